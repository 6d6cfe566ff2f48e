// Helpers of the test device's kernels: CPU tensors over device memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "enqueue.h"

namespace ldt::test_device {

/// A CPU tensor over the same memory that does not own it: late reads see poison. For use on a
/// stream's thread.
at::Tensor on_cpu(const at::Tensor& tensor);

/// Marks `tensor` as a wrapped Python number for type promotion if `original` is one.
void keep_wrapped_number(const at::Tensor& tensor, const at::Tensor& original);

/// Moves a storage to other memory, with as many of its bytes as fit.
void resize_storage(const c10::Storage& storage, size_t bytes);

/// The generator of each device: of the CPU's kind, as its kernels draw the numbers.
LDT_TEST_EXPORT const std::vector<at::Generator>& generators();

/// Runs an operator of the CPU on the current stream. Results are allocated first, from those on
/// "meta". The host waits where "meta" has no answer (the result is not a tensor, or its shape
/// depends on values), and where the order of random numbers matters.
void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ldt::test_device
