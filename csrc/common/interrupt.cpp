// The process-wide check.
#include "common/interrupt.h"

#include <atomic>

namespace ldt {
namespace {
std::atomic<InterruptCheck> installed{nullptr};
}

void set_interrupt_check(InterruptCheck check) { installed = check; }

void check_interrupt() {
  if (InterruptCheck check = installed.load()) {
    check();
  }
}

}  // namespace ldt
