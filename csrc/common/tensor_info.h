// What error texts and checks say of a tensor.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace ldt {

/// "float32": the dtype's name in Python.
std::string dtype_name(at::ScalarType dtype);
/// "float32[4, 8], int64[3]": what a message holds, for checks and error texts.
std::string describe(const std::vector<at::Tensor>& tensors);
/// Whether the tensor's elements are bytes in memory of its own. The address of a wrapper (a fake
/// tensor, a DTensor, the result of a collective that was not waited for) is null or another's.
bool is_sendable(const at::Tensor& tensor);

}  // namespace ldt
