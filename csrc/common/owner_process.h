// Which process made an object. A forked child has none of its threads, locks that they held at the
// fork for ever, and connections that are its parent's.
#pragma once

#include <sys/types.h>

#include <string>

namespace ldt {

class OwnerProcess {
 public:
  OwnerProcess();
  /// Whether this is still the process that made it.
  bool is_current() const;
  /// Throws LaneError in a forked child, in which nothing of `what` may be touched.
  void check(const std::string& what) const {
    if (!is_current()) refuse(what);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const;

  int generation_;  // cheaper to ask for than the number of the process
  pid_t pid_;
};

}  // namespace ldt
