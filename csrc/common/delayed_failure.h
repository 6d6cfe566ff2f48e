// A failure that is reported only if no better explanation comes first.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace ldt {

/// Why a connection does not work any more. It may be lost as a process was, which is reported
/// within seconds by whoever watches processes, so this keeps silent for so long.
class DelayedFailure {
 public:
  /// Records `text` unless an earlier failure is recorded.
  void set(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!text_.empty()) return;
    text_ = text;
    since_ = std::chrono::steady_clock::now();
  }
  /// The failure once it is due, empty before.
  std::string text() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_due = std::chrono::steady_clock::now() - since_ >= kDelay;
    return is_due ? text_ : std::string();
  }

 private:
  static constexpr std::chrono::seconds kDelay{4};

  mutable std::mutex mutex_;
  std::string text_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace ldt
