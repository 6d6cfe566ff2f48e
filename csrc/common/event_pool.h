// Reused stream events: creating one costs microseconds, a lane needs one or two per message.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <vector>

#include "common/event.h"

namespace ldt {

/// Hands out events of one device. An event comes back by itself when its last owner lets go.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(c10::Device device) : device_(device) {}

  /// The end of what is on `stream` now.
  std::shared_ptr<const Event> record(const c10::Stream& stream);

 private:
  class PooledEvent final : public Event {
   public:
    explicit PooledEvent(c10::DeviceType type) : event_(type) {}
    void record(const c10::Stream& stream) { event_.record(stream); }
    bool is_done() const override { return event_.query(); }
    void block(const c10::Stream& stream) const override { event_.block(stream); }

   private:
    c10::Event event_;
  };

  c10::Device device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<PooledEvent>> idle_;
};

}  // namespace ldt
