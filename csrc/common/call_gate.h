// Keeps calls and the teardown of what they use apart.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "common/error.h"

namespace ldt {

/// Admits one call at a time until it is closed for good.
class CallGate {
 public:
  /// Hold the lock while a call runs. Throws LaneError once the gate is closed.
  std::unique_lock<std::mutex> enter() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_closed_) throw_lane_error("the lane was aborted or closed");
    return lock;
  }
  /// Admits no further call. Waits up to `timeout` for the one that runs; returns whether it ended.
  bool close(std::chrono::milliseconds timeout) {
    is_closed_ = true;
    const auto end = std::chrono::steady_clock::now() + timeout;
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    while (!lock.owns_lock() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.try_lock();  // ThreadSanitizer of GCC 12 does not know locks with a time limit
    }
    return lock.owns_lock();
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_closed_{false};
};

}  // namespace ldt
