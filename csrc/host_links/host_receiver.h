// The receiving end of a host link.
#pragma once

#include "copy_engine/copy_engine.h"
#include "copy_engine/link_end.h"
#include "host_links/staged_transfers.h"

namespace ldt {

/// Has the link fill slots, as soon as a message is begun, and copies from them.
class HostReceiver final : public ReceivingEnd {
 public:
  /// See HostSender.
  HostReceiver(c10::Device device, std::shared_ptr<SocketLink> link, uint32_t lane);

  void begin(const c10::Stream& stream, const Target& target, int64_t piece_bytes,
             std::chrono::milliseconds timeout) override;
  void await(const c10::Stream& stream, int64_t bytes) override;
  int64_t enqueued() const override { return enqueued_; }
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
  Target target_;
  int64_t piece_bytes_ = 0;
  int64_t asked_ = 0;  // bytes awaited
  int64_t done_ = 0;   // bytes in the target
};

}  // namespace ldt
