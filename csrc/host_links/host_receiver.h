// The receiving end of a host link.
#pragma once

#include "host_links/host_end.h"

namespace ldt {

/// Has the link fill slots, as soon as a message is begun, and copies from them.
class HostReceiver final : public HostEnd<ReceivingEnd> {
 public:
  /// See HostEnd.
  HostReceiver(c10::Device device, std::shared_ptr<SocketLink> link, uint32_t lane)
      : HostEnd(device, std::move(link), lane, StagedTransfers::Direction::kReceive) {}

  void begin(const c10::Stream& stream, const Target& target, int64_t piece_bytes,
             std::chrono::milliseconds timeout) override;
  void await(const c10::Stream& stream, int64_t bytes) override;

 private:
  // The current message.
  Target target_;
  int64_t asked_ = 0;  // bytes awaited
  int64_t done_ = 0;   // bytes in the target
};

}  // namespace ldt
