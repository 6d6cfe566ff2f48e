// CUDA's copy engine and stream memory operations, through the driver that torch has loaded.
#pragma once

#include "copy_engine/copy_engine.h"

namespace ldt {

/// Null where no driver can be loaded. Builds without the CUDA toolkit: the driver's functions are
/// looked up by name.
CopyEngine* cuda_copy_engine();

}  // namespace ldt
