// What both ends of a host link have in common.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "copy_engine/copy_engine.h"
#include "copy_engine/link_end.h"
#include "host_links/staged_transfers.h"

namespace ldt {

/// Moves pieces through slots: the device on one side, the link on the other. `End` is SendingEnd
/// or ReceivingEnd.
template <typename End>
class HostEnd : public End {
 public:
  int64_t enqueued() const override { return enqueued_; }
  void flush() override { transfers_.flush(); }
  void hold() override { transfers_.abort(); }
  void release() override { ring_->by_link().release(); }
  std::string failure() const override { return transfers_.failure(); }

 protected:
  /// `lane` is the lane's number, which no other lane of the link has. Throws LaneError if the
  /// device has no usable copy engine.
  HostEnd(c10::Device device, std::shared_ptr<SocketLink> link, uint32_t lane,
          StagedTransfers::Direction direction)
      : engine_(require_copy_engine(device)),
        ring_(std::make_shared<StagingRing>(device)),
        transfers_(ring_, std::move(link), lane, direction) {}

  CopyEngine& engine_;
  const std::shared_ptr<StagingRing> ring_;
  StagedTransfers transfers_;
  int64_t enqueued_ = 0;
  uint64_t piece_ = 0;  // the next one
};

}  // namespace ldt
