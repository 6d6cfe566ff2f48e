// The undocumented names of torch, but for those of Python (bindings/torch_python.h). Read in torch
// 2.13; check each one when a new release fails to compile or behaves differently.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <utility>
#include <vector>

namespace ldt::torch_private {

/// c10::impl (c10/core/impl/VirtualGuardImpl.h): the streams of any device type, CUDA and torch_npu
/// alike. The public c10::StreamGuard only sets a stream; it cannot ask for one.
using DeviceStreams = c10::impl::VirtualGuardImpl;

/// c10::impl: whether a device type has streams at all. DeviceStreams throws where it has none.
inline bool has_streams(c10::DeviceType type) { return c10::impl::hasDeviceGuardImpl(type); }

/// Underscored operator: copies a list of tensors in a few launches. Public torch._foreach_copy_
/// has no C++ name without the underscore.
inline void foreach_copy(at::TensorList targets, at::TensorList sources) {
  at::_foreach_copy_(targets, sources);
}

/// ATen/MemoryOverlap.h: whether two elements of the tensor share memory. copy_ asserts the same.
inline bool overlaps_itself(const at::Tensor& tensor) {
  return at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

/// Dispatch key Python: set on subclasses with __torch_dispatch__, whose own address is null or not
/// where the data is.
inline bool is_wrapper(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python);
}

/// TensorImpl: the same of a tensor that is still inside its own __torch_dispatch__.
inline bool has_python_dispatch(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

/// StorageImpl: torch's allocators make resizable storages, from_blob and external_tensor do not.
inline bool is_resizable(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->resizable();
}

/// c10/core/TensorImpl.h: the counter behind torch.Tensor._version. A copy shares the count and
/// holds no memory of the tensor.
using VersionCounter = c10::VariableVersion;
inline const VersionCounter& version_counter(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter();
}

/// c10/core/StorageImpl.h: a storage of the device's own kind, which torch_npu relies on; the
/// public at::from_blob makes c10's plain one. `free` is called with `address` when the last owner
/// dies.
inline c10::Storage make_storage(void* address, size_t bytes, c10::Device device,
                                 const std::function<void(void*)>& free) {
  return c10::make_storage_impl(
      c10::StorageImpl::use_byte_size_t(), bytes,
      c10::InefficientStdFunctionContext::makeDataPtr(address, free, device),
      /*allocator=*/nullptr, /*resizable=*/false, device);
}

/// at::detail: a tensor made without a dispatched operator, which costs microseconds.
inline at::Tensor make_tensor(c10::Storage storage, c10::DispatchKeySet keys,
                              at::ScalarType dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys,
                                                  c10::scalarTypeToTypeMeta(dtype));
}
/// TensorImpl: sets what such a tensor looks like, contiguous from `offset` elements on.
inline void set_contiguous(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t offset) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  impl->set_storage_offset(offset);
}

/// c10::intrusive_ptr: another owner of an object of which pybind11 gives a plain pointer.
template <typename T>
c10::intrusive_ptr<T> share(T* object) {
  if (object == nullptr) return {};
  return c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(object);
}

}  // namespace ldt::torch_private
