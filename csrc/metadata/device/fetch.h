// Device tensors brought to the host in one copy.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace ldt::metadata {

/// The elements of contiguous tensors, on the host.
struct Fetched {
  at::Tensor buffer;  // keeps what `data` points to
  std::vector<const void*> data;
};

/// One gather on the device and one copy, on its current stream; blocks until it is done.
Fetched fetch(const std::vector<at::Tensor>& tensors);

/// Memory on the host that `device` copies from and to without a detour.
at::Tensor staging_bytes(int64_t bytes, c10::Device device);

}  // namespace ldt::metadata
