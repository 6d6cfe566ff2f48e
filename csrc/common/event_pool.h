// Reuses stream events: creating one takes microseconds, and a message needs one or two.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <vector>

#include "common/event.h"

namespace ldt {

/// Pools the events of one device. An event returns to the pool when its last owner drops it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(c10::Device device) : device_(device) {}

  /// Records the current end of `stream`.
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
