// Takes events from the pool and returns them.
#include "common/event_pool.h"

namespace ldt {

std::shared_ptr<const Event> EventPool::record(const c10::Stream& stream) {
  std::unique_ptr<PooledEvent> event;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      event = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!event) event = std::make_unique<PooledEvent>(device_.type());
  event->record(stream);
  // The deleter owns the pool, so an event may outlive the lane that recorded it.
  return std::shared_ptr<PooledEvent>(event.release(),
                                      [pool = shared_from_this()](PooledEvent* done) {
                                        const std::lock_guard<std::mutex> lock(pool->mutex_);
                                        pool->idle_.emplace_back(done);
                                      });
}

}  // namespace ldt
