// Taking events from the pool and giving them back.
#include "common/event_pool.h"

namespace ldt {

std::shared_ptr<c10::Event> EventPool::record(const c10::Stream& stream) {
  std::unique_ptr<c10::Event> event;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      event = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!event) {
    event = std::make_unique<c10::Event>(device_.type());
  }
  event->record(stream);
  // The deleter owns the pool, so an event may outlive the lane that asked for it.
  return std::shared_ptr<c10::Event>(event.release(),
                                     [pool = shared_from_this()](c10::Event* done) {
                                       std::lock_guard<std::mutex> lock(pool->mutex_);
                                       pool->idle_.emplace_back(done);
                                     });
}

}  // namespace ldt
