// A storage of the device's own kind, and a tensor over it.
#include "memory/external_tensor.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/strides.h>

namespace ldt {

at::Tensor external_tensor(void* address, at::IntArrayRef sizes, at::ScalarType dtype,
                           c10::Device device, std::function<void(void*)> give_back) {
  const auto bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  auto memory = c10::InefficientStdFunctionContext::makeDataPtr(address, give_back, device);
  // Not at::from_blob, which makes c10's plain storages: those of a device may be of a kind of
  // their own, which torch_npu relies on. set_ lets the device write down the shape there.
  c10::Storage storage(c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), bytes,
                                              std::move(memory), /*allocator=*/nullptr,
                                              /*resizable=*/false, device));
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device))
      .set_(std::move(storage), 0, sizes, c10::contiguous_strides(sizes));
}

}  // namespace ldt
