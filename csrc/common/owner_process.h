// Detects use in a forked child. A child has none of its parent's threads, may inherit locked
// locks, and shares the parent's connections.
#pragma once

#include <sys/types.h>

#include <string>

namespace ldt {

/// Remembers the process that constructed it.
class OwnerProcess {
 public:
  OwnerProcess();
  /// Whether the caller runs in that process.
  bool is_current() const;
  /// Throws LaneError in a forked child, where `what` must not be touched.
  void check(const std::string& what) const {
    if (!is_current()) refuse(what);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const;

  int generation_;  // cheaper than getpid()
  pid_t pid_;
};

}  // namespace ldt
