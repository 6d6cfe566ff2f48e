// Rebuilds all rows of a message on a device in one launch.
#pragma once

#include <ATen/ATen.h>

#include "metadata/codec/decoder.h"

namespace ldt::metadata {

/// The buffer of all tensors, on a `device` with kernels. Takes one copy and one launch on its
/// current stream; the host does not wait.
at::Tensor rebuild_on_device(const Decoded& decoded, c10::Device device);

}  // namespace ldt::metadata
