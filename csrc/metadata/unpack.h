// From a message to the tensors of a step.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "metadata/format/message.h"

namespace ldt::metadata {

/// The content of a message and its tensors, in the order of the microbatches' forms, as views of
/// one buffer on `device`. On a device with streams the tensors are ready in order of its current
/// stream; the host does not wait. On the meta device no rows are rebuilt.
struct Unpacked {
  Content content;
  std::vector<at::Tensor> tensors;
};
Unpacked unpack(const at::Tensor& data, c10::Device device, int64_t max_elements);

}  // namespace ldt::metadata
