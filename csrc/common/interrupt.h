// Lets a long host-side wait notice Ctrl-C without knowing Python.
#pragma once

namespace ldt {

/// Called from waiting threads every few tenths of a second; may throw to end the wait.
using InterruptCheck = void (*)();

/// Installs the check (the bindings do, once); nullptr removes it.
void set_interrupt_check(InterruptCheck check);

/// Runs the installed check, if any.
void check_interrupt();

}  // namespace ldt
