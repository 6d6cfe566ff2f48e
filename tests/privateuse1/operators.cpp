// The operators that a device must have itself: memory, copies, views.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "memory.h"
#include "streams.h"

namespace ldt::test_device {

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto& memory = tensor.storage();
  check_storage(memory);
  const c10::Device cpu(c10::kCPU);
  c10::Storage borrowed(c10::Storage::use_byte_size_t(), memory.nbytes(),
                        c10::DataPtr(memory.mutable_data(), cpu), /*allocator=*/nullptr,
                        /*resizable=*/false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(borrowed), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  keep_wrapped_number(alias, tensor);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

void keep_wrapped_number(const at::Tensor& tensor, const at::Tensor& original) {
  // torch allows even `false` only for zero-dimensional tensors.
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto& now = current_stream(storage.device().index());
  auto memory = allocator()->allocate(bytes);
  const auto kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    now.enqueue([to = memory.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); });
    note_use(storage.data_ptr(), now.handle());
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Not at::detail::empty_generic, which creates plain c10 storages.
at::Tensor with_memory(size_t bytes, std::optional<at::ScalarType> dtype,
                       std::optional<at::Device> device) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  auto memory = allocator()->allocate(bytes);
  const auto place = memory.device();
  c10::Storage storage(c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), bytes,
                                              std::move(memory), allocator(), /*resizable=*/true,
                                              place));
  return at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), kKeys, c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  at::detail::check_size_nonnegative(size);
  const auto bytes = at::detail::computeStorageNbytesContiguous(
      size, c10::elementSize(c10::dtype_or_default(dtype)));
  auto made = with_memory(bytes, dtype, device);
  made.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  at::detail::check_size_nonnegative(size);
  const auto bytes = at::detail::computeStorageNbytes(
      size, stride, c10::elementSize(c10::dtype_or_default(dtype)));
  auto made = with_memory(bytes, dtype, device);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  const auto bytes =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  check_storage(source);
  const auto bytes =
      stride.empty() ? at::detail::computeStorageNbytesContiguous(size, self.element_size(), offset)
                     : at::detail::computeStorageNbytes(size, stride, self.element_size(), offset);
  if (bytes > source.nbytes()) resize_storage(source, bytes);
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

// A tensor on the CPU over the same memory. One of the host is kept while the copy is enqueued, but
// not its Python object.
at::Tensor memory_of(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor.alias() : on_cpu(tensor);
}

/// Copies within a device in stream order, and between it and pinned memory if asked not to block.
/// Else, to the host the host waits, and from the host the data are read at once.
at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const auto device = source.is_cpu() ? target.device() : source.device();
  const c10::DeviceGuard guard(device);
  auto& now = current_stream(device.index());
  const auto& host = source.is_cpu() ? source : target;
  if (non_blocking && host.is_cpu() && is_pinned(host.const_data_ptr())) {
    now.enqueue([from = memory_of(source), to = memory_of(target)] { to.copy_(from); });
  } else if (target.is_cpu()) {
    now.synchronize();
    target.copy_(on_cpu(source));
  } else {
    const auto from = source.is_cpu() ? source.clone() : on_cpu(source);
    now.enqueue([from, to = on_cpu(target)] { to.copy_(from); });
  }
  return target;
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return target.copy_(source);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Scalar value_of(const at::Tensor& self) {
  current_stream(self.device().index()).synchronize();
  return at::_local_scalar_dense(on_cpu(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  note_use(self.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(value_of));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

}  // namespace ldt::test_device
