// Copies device tensors to the host at once.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace ldt::metadata {

/// The elements of contiguous tensors, on the host.
struct Fetched {
  at::Tensor buffer;  // keeps what `data` points to
  std::vector<const void*> data;
};

/// Takes one gather and one copy on the device's current stream, and blocks until they are done.
Fetched fetch(const std::vector<at::Tensor>& tensors);

/// Host memory for direct copies from and to `device`: pinned for CUDA.
at::Tensor staging_bytes(int64_t bytes, c10::Device device);

}  // namespace ldt::metadata
