// Rebuilds all rows of a message on a device in one launch.
#pragma once

#include <ATen/ATen.h>

#include "metadata/codec/decoder.h"

namespace ldt::metadata {

/// The buffer of all tensors, on `device`, for which this build has kernels. One copy to the device
/// and one launch, both on its current stream; the host does not wait.
at::Tensor rebuild_on_device(const Decoded& decoded, c10::Device device);

}  // namespace ldt::metadata
