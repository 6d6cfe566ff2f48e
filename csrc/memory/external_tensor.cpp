// A storage of the device's own kind, and a tensor over it.
#include "memory/external_tensor.h"

#include <c10/util/strides.h>

#include "common/torch_private.h"

namespace ldt {

at::Tensor external_tensor(void* address, at::IntArrayRef sizes, at::ScalarType dtype,
                           c10::Device device, std::function<void(void*)> free) {
  const auto bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  auto storage = torch_private::make_storage(address, bytes, device, free);
  // set_ lets the device record the shape in its own storage.
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(device))
      .set_(std::move(storage), 0, sizes, c10::contiguous_strides(sizes));
}

}  // namespace ldt
