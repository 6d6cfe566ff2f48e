// The sending end of a host link.
#pragma once

#include "host_links/host_end.h"

namespace ldt {

/// Copies pieces into slots, from which the link sends them. The device waits for a slot where the
/// link is slow, the host never.
class HostSender final : public HostEnd<SendingEnd> {
 public:
  /// See HostEnd.
  HostSender(c10::Device device, std::shared_ptr<SocketLink> link, uint32_t lane)
      : HostEnd(device, std::move(link), lane, StagedTransfers::Direction::kSend) {}

  void begin(const c10::Stream& stream, const Source& source,
             std::chrono::milliseconds timeout) override;
  void push(const c10::Stream& stream, int64_t bytes) override;
  std::shared_ptr<const Event> sent() const override { return nullptr; }

 private:
  // The current message.
  Source source_;
  int64_t done_ = 0;  // bytes copied
};

}  // namespace ldt
