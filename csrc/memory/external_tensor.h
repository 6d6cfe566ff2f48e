// Tensors over memory that somebody else owns.
#pragma once

#include <ATen/ATen.h>

#include <functional>

namespace ldt {

/// A contiguous tensor over `address`. `give_back` is called with it when the last reference dies.
at::Tensor external_tensor(void* address, at::IntArrayRef sizes, at::ScalarType dtype,
                           c10::Device device, std::function<void(void*)> give_back);

}  // namespace ldt
