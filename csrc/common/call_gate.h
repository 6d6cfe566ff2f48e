// Keeps calls and the teardown of what they use apart.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

#include "common/error.h"

namespace ldt {

/// Admits one call at a time until it is closed for good.
class CallGate {
 public:
  /// Hold the lock while a call runs. Throws LaneError once the gate is closed.
  std::unique_lock<std::timed_mutex> enter() {
    std::unique_lock<std::timed_mutex> lock(mutex_);
    if (is_closed_) throw_lane_error("the lane was aborted or closed");
    return lock;
  }
  /// Admits no further call. Waits up to `timeout` for the one that runs; returns whether it ended.
  bool close(std::chrono::milliseconds timeout) {
    is_closed_ = true;
    const std::unique_lock<std::timed_mutex> lock(mutex_, timeout);
    return lock.owns_lock();
  }

 private:
  std::timed_mutex mutex_;
  std::atomic<bool> is_closed_{false};
};

}  // namespace ldt
