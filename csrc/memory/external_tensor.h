// Tensors over memory that torch does not own.
#pragma once

#include <ATen/ATen.h>

#include <functional>

namespace ldt {

/// A contiguous tensor over `address`. Calls `free(address)` when the last reference dies.
at::Tensor external_tensor(void* address, at::IntArrayRef sizes, at::ScalarType dtype,
                           c10::Device device, std::function<void(void*)> free);

}  // namespace ldt
