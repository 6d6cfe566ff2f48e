// Waits in slices, so that Ctrl-C ends a wait.
#include "transports/deferred_event.h"

#include <chrono>
#include <utility>

#include "common/interrupt.h"

namespace ldt {
namespace {

constexpr std::chrono::milliseconds kSlice{100};

}  // namespace

bool DeferredEvent::is_done() const { return is_recorded() && (!event_ || event_->is_done()); }

bool DeferredEvent::is_recorded() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

void DeferredEvent::block(const c10::Stream& stream) const {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kSlice, [this] { return recorded_; })) {
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  lock.unlock();
  if (event_) event_->block(stream);
}

void DeferredEvent::set(std::shared_ptr<const Event> event) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    event_ = std::move(event);
    recorded_ = true;
  }
  changed_.notify_all();
}

}  // namespace ldt
