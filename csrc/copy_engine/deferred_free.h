// What outlives its owner, as devices or other processes still use it.
#pragma once

#include <functional>
#include <memory>

namespace ldt {

/// Keeps `what` until `is_unused` says so. It is asked now and whenever something else is kept;
/// what is left at exit goes with the process.
void free_when(std::function<bool()> is_unused, std::shared_ptr<const void> what);

/// Frees what is no longer used: before more memory is asked for.
void run_deferred_frees();

}  // namespace ldt
