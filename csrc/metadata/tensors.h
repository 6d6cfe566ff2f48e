// Torch tensors in and out of messages: the only part of the metadata core that knows torch.
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

/// Tensors of a step that are contiguous: the caller's, or copies of them.
using Tensors = std::vector<c10::MaybeOwned<at::Tensor>>;

/// The place of a torch type in kDTypes, and back. Throws MetadataError for a type that is not
/// there.
uint8_t wire_dtype(at::ScalarType dtype);
at::ScalarType torch_dtype(uint8_t dtype);

/// The message that says `content`, all of which is set but the forms and their numbers: bytes on
/// the CPU. `named` are the tensors of all microbatches, within each in any order. Tensors may be
/// on the CPU or on one device; what lies on a device is scanned there, or brought to the host in
/// one copy where there are no kernels for it. Blocks until the device's current stream has done
/// that. Throws MetadataError for tensors that cannot cross, naming microbatch and tensor.
at::Tensor pack(Content content, std::vector<NamedTensor> named, int64_t max_elements);

/// What a message says, and its tensors in the order of the microbatches' forms, as views of one
/// buffer on `device`. On a device with streams the tensors are ready for its current stream; the
/// host does not wait.
struct Unpacked {
  Content content;
  std::vector<at::Tensor> tensors;
};
Unpacked unpack(const at::Tensor& data, c10::Device device, int64_t max_elements);

/// Whether this build has kernels for `device`.
bool has_kernels(c10::Device device);

}  // namespace ldt::metadata
