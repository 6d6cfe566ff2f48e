// Between the thread that makes calls and another one that ends what they use.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

#include "common/error.h"

namespace ldt {

/// Calls go in one at a time, until the gate is shut for good.
class CallGate {
 public:
  /// Held while a call runs. Throws LaneError once the gate is shut.
  std::unique_lock<std::timed_mutex> enter() {
    std::unique_lock<std::timed_mutex> lock(mutex_);
    if (is_closed_) throw_lane_error("the lane was aborted or closed");
    return lock;
  }
  /// No call goes in any more. Waits for one that is inside, at most `timeout`; whether it has
  /// left.
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
