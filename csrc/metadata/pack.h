// From the tensors of a step to its message.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <string_view>
#include <vector>

#include "metadata/format/message.h"

namespace ldt::metadata {

/// A tensor of the edge; `name` is its index in kNames. Borrowed: another reference to a tensor
/// with a Python object takes the GIL, when it is made and when it is dropped.
struct NamedTensor {
  uint8_t name;
  const at::Tensor* tensor;
};
/// The index of a name in kNames. Throws MetadataError for an unknown one.
uint8_t name_number(std::string_view name);
/// The beginning of error texts about one tensor.
std::string title_of_tensor(int64_t microbatch, std::string_view name);

/// The message of `content`, as bytes on the CPU. Set everything in `content` but the forms and
/// their numbers. `named` has the tensors of all microbatches, in any order within each. Tensors
/// may be on the CPU or on one device. Kernels scan those on a device; without kernels, one copy
/// brings them to the host. Blocks until the device's current stream has finished. Throws
/// MetadataError that names microbatch and tensor for tensors that must not be sent.
at::Tensor pack(Content content, std::vector<NamedTensor> named, int64_t max_elements);

}  // namespace ldt::metadata
