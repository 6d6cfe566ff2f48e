// The test device's copy engine, as far as tests turn it.
#pragma once

#include <string>

#include "enqueue.h"

namespace ldt::test_device {

/// Makes this process's device say that it has none, and why; an empty text lets it again.
LDT_TEST_EXPORT void refuse_peers(const std::string& why);

}  // namespace ldt::test_device
