// Reused stream events: creating one costs microseconds, a lane needs one or two per message.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <vector>

namespace ldt {

/// Hands out events of one device. An event comes back by itself when its last owner lets go.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(c10::Device device) : device_(device) {}

  /// An event that nobody else holds, recorded on `stream`.
  std::shared_ptr<c10::Event> record(const c10::Stream& stream);

 private:
  c10::Device device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> idle_;
};

}  // namespace ldt
