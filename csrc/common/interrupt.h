// Lets long host-side waits react to Ctrl-C without depending on Python.
#pragma once

namespace ldt {

/// Waiting threads call it a few times a second. It may throw to end the wait.
using InterruptCheck = void (*)();

/// The bindings install the check, once; nullptr removes it.
void set_interrupt_check(InterruptCheck check);

/// Runs the installed check, if any.
void check_interrupt();

}  // namespace ldt
