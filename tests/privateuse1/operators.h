// What the kernels of the test device share: tensors of the CPU over a device's memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace ldt::test_device {

/// A CPU tensor over the same memory that keeps nothing alive: what reads it too late, reads
/// poison. For use on a stream's thread.
at::Tensor on_cpu(const at::Tensor& tensor);

/// Makes `tensor` a number of Python's to type promotion if `original` is one.
void keep_wrapped_number(const at::Tensor& tensor, const at::Tensor& original);

/// Gives a storage other memory, with the same bytes as far as they go.
void resize_storage(const c10::Storage& storage, size_t bytes);

/// Runs an operator of the CPU on the current stream. Its results are allocated before, from what
/// the operator returns for tensors on "meta"; where that cannot tell (the result is no tensor, or
/// its shape depends on values) or where the order of random numbers counts, the host waits.
void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace ldt::test_device
