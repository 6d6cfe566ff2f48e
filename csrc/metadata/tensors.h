// Torch tensors in and out of messages: the only part of the metadata core that knows torch.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "metadata/message.h"

namespace ldt::metadata {

/// A microbatch as the edge has it. `hops` are numbers in Content::hops.
struct TensorMicrobatch {
  int64_t id = 0;
  std::vector<uint32_t> hops;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
};

/// The place of a torch type in kDTypes, and back. Throws MetadataError for a type that is not
/// there.
uint8_t wire_dtype(at::ScalarType dtype);
at::ScalarType torch_dtype(uint8_t dtype);

/// The message that says `content` (whose call and hops are set) and the microbatches: bytes on the
/// CPU. Tensors may be on the CPU or on one device; what lies on a device is scanned there, or
/// brought to the host in one copy where there are no kernels for it. Blocks until the device's
/// current stream has done that. Throws MetadataError for tensors that cannot cross, naming
/// microbatch and tensor.
at::Tensor pack(Content content, const std::vector<TensorMicrobatch>& microbatches,
                int64_t max_elements);

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
