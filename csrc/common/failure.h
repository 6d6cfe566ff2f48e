// Why a lane is unusable. The first failure wins, and every thread sees it.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "common/error.h"

namespace ldt {

class Failure {
 public:
  /// Records `text` unless an earlier failure is recorded. Returns whether it was recorded.
  bool set(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (happened_) return false;
    text_ = text;
    happened_ = true;
    return true;
  }
  bool happened() const { return happened_; }
  std::string text() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return text_;
  }
  void throw_if_happened() const {
    if (happened_) throw_lane_error(text());
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> happened_{false};
  std::string text_;
};

}  // namespace ldt
