// Frees memory once devices and other processes no longer use it.
#pragma once

#include <functional>
#include <memory>

namespace ldt {

/// Drops `what` once `is_unused` returns true. Asks now and on every later call; what is left at
/// exit ends with the process.
void free_when(std::function<bool()> is_unused, std::shared_ptr<const void> what);

/// Drops what is unused by now. Call it before allocating more memory.
void run_deferred_frees();

}  // namespace ldt
