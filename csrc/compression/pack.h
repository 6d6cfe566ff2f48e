// Tensors in 8 bits: fp8 e4m3 in blocks of 128 with a scale each (docs/wire_format.md).
#pragma once

#include <ATen/ATen.h>

namespace ldt::compression {

/// Whether this build packs tensors on `device`: the CPU, and CUDA with kernels.
bool has_kernels(c10::Device device);

/// The elements of a float32, bfloat16 or float16 tensor, in the order of a contiguous one: uint8
/// of packed_bytes(elements). On a device it is enqueued on the current stream. Throws ValueError.
at::Tensor pack_8bit(const at::Tensor& tensor);

/// Unpacks into `tensor`, which has the dtype and the elements of the packed one and is contiguous.
void unpack_8bit(const at::Tensor& packed, const at::Tensor& tensor);

}  // namespace ldt::compression
