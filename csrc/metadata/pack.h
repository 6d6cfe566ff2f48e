// From the tensors of a step to its message.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <string_view>
#include <vector>

#include "metadata/format/message.h"

namespace ldt::metadata {

/// A tensor as the edge has it: `name` is its place in kNames. It is the caller's: another
/// reference to a tensor that Python has takes the GIL, now and when it is dropped.
struct NamedTensor {
  uint8_t name;
  const at::Tensor* tensor;
};
/// The place of a name in kNames. Throws MetadataError for one that is not there.
uint8_t name_number(std::string_view name);
/// The title of errors of one tensor.
std::string title_of_tensor(int64_t microbatch, std::string_view name);

/// The message that says `content`, all of which is set but the forms and their numbers: bytes on
/// the CPU. `named` are the tensors of all microbatches, within each in any order. Tensors may be
/// on the CPU or on one device; what lies on a device is scanned there, or brought to the host in
/// one copy where there are no kernels for it. Blocks until the device's current stream has done
/// that. Throws MetadataError for tensors that cannot cross, naming microbatch and tensor.
at::Tensor pack(Content content, std::vector<NamedTensor> named, int64_t max_elements);

}  // namespace ldt::metadata
