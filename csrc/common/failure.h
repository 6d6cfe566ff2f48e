// Why a lane can no longer be used: the first failure wins, everyone sees it.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "common/error.h"

namespace ldt {

class Failure {
 public:
  /// Keeps `text` if nothing failed before. Returns whether it did.
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
