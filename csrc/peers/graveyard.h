// What a device may still use after its owners are done with it.
#pragma once

#include <memory>
#include <vector>

#include "common/end.h"

namespace ldt {

/// Keeps `what` until all of `until` are reached: what is enqueued on a stream reads and writes by
/// address, and does not own. Looks at what it keeps whenever something comes, and at the process's
/// end leaves it as it is.
void keep_until(std::vector<std::shared_ptr<const End>> until, std::shared_ptr<const void> what);

}  // namespace ldt
