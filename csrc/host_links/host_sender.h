// The sending end of a host link.
#pragma once

#include "copy_engine/copy_engine.h"
#include "copy_engine/link_end.h"
#include "host_links/staged_transfers.h"

namespace ldt {

/// Copies pieces into slots, from which the link sends them. The device waits for a slot where the
/// link is slow, the host never.
class HostSender final : public SendingEnd {
 public:
  /// `lane` is the lane's number, which no other lane of the link has. Throws LaneError if the
  /// device has no usable copy engine.
  HostSender(c10::Device device, std::shared_ptr<SocketLink> link, uint32_t lane);

  void begin(const c10::Stream& stream, const Source& source,
             std::chrono::milliseconds timeout) override;
  void push(const c10::Stream& stream, int64_t bytes) override;
  std::shared_ptr<const Event> sent() const override { return nullptr; }
  int64_t enqueued() const override { return enqueued_; }
  void flush() override { transfers_.flush(); }
  void hold() override { transfers_.abort(); }
  void release() override { ring_->by_link().release(); }
  std::string failure() const override { return transfers_.failure(); }

 private:
  CopyEngine& engine_;
  const std::shared_ptr<StagingRing> ring_;
  StagedTransfers transfers_;

  int64_t enqueued_ = 0;
  uint64_t piece_ = 0;  // the next one

  // The current message.
  Source source_;
  int64_t piece_bytes_ = 0;
  int64_t done_ = 0;  // bytes copied
};

}  // namespace ldt
