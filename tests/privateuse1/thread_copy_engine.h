// Turns the test device's copy engine off and on.
#pragma once

#include <string>

#include "enqueue.h"

namespace ldt::test_device {

/// Makes this process's device report that its copy engine is unavailable; an empty text undoes it.
LDT_TEST_EXPORT void refuse_copy_engine(const std::string& why);

}  // namespace ldt::test_device
