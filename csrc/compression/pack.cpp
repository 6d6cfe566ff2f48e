// Checks of the tensors, and which codec runs.
#include "compression/pack.h"

#include <c10/core/DeviceGuard.h>

#include "common/streams.h"
#include "common/tensor_info.h"
#include "compression/cuda/kernels.h"
#include "compression/host_codec.h"

namespace ldt::compression {
namespace {

Element element_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Element::kFloat32;
    case at::kBFloat16: return Element::kBFloat16;
    case at::kHalf: return Element::kFloat16;
    default:
      TORCH_CHECK_VALUE(false, "8 bit compression: expected float32, bfloat16 or float16, got ",
                        dtype_name(tensor.scalar_type()), "; send it as it is");
  }
}

void check_device(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(has_kernels(tensor.device()), "8 bit compression: expected a tensor on the CPU",
                    has_kernels(at::kCUDA) ? " or on CUDA" : "", ", got one on ",
                    tensor.device().str(), ", for which this build has no kernels");
}

#ifdef LDT_CUDA_KERNELS
template <typename Launch>
void run_on_device(c10::Device device, const Launch& launch) {
  const c10::DeviceGuard guard(device);
  const char* const error = launch(native_handle(current_stream(device)));
  TORCH_CHECK(error == nullptr, "8 bit compression on ", device.str(), " failed: ", error);
}
#endif

}  // namespace

bool has_kernels(c10::Device device) {
#ifdef LDT_CUDA_KERNELS
  if (device.is_cuda()) return true;
#endif
  return device.is_cpu();
}

at::Tensor pack_8bit(const at::Tensor& tensor) {
  const Element element = element_of(tensor);
  check_device(tensor);
  const at::Tensor data = tensor.contiguous();
  auto packed = at::empty({packed_bytes(data.numel())}, data.options().dtype(at::kByte));
  if (data.is_cpu()) {
    pack_host(data.const_data_ptr(), element, data.numel(), packed.mutable_data_ptr<uint8_t>());
    return packed;
  }
#ifdef LDT_CUDA_KERNELS
  run_on_device(data.device(), [&](void* stream) {
    return ldt_compression_pack(data.const_data_ptr(), element, data.numel(),
                                packed.mutable_data_ptr<uint8_t>(), stream);
  });
#endif
  return packed;
}

void unpack_8bit(const at::Tensor& packed, const at::Tensor& tensor) {
  const Element element = element_of(tensor);
  check_device(tensor);
  TORCH_CHECK_VALUE(
      packed.scalar_type() == at::kByte && packed.numel() == packed_bytes(tensor.numel()) &&
          packed.device() == tensor.device(),
      "8 bit compression: expected ", packed_bytes(tensor.numel()), " bytes on ",
      tensor.device().str(), " for ", describe({tensor}), ", got ", describe({packed}), " on ",
      packed.device().str(), "; both ends must agree on the tensor and on the compression");
  TORCH_CHECK_VALUE(packed.is_contiguous() && tensor.is_contiguous(),
                    "8 bit compression: expected contiguous tensors to unpack from and into");
  if (tensor.is_cpu()) {
    unpack_host(packed.const_data_ptr<uint8_t>(), element, tensor.numel(),
                tensor.mutable_data_ptr());
    return;
  }
#ifdef LDT_CUDA_KERNELS
  run_on_device(tensor.device(), [&](void* stream) {
    return ldt_compression_unpack(packed.const_data_ptr<uint8_t>(), element, tensor.numel(),
                                  tensor.mutable_data_ptr(), stream);
  });
#endif
}

}  // namespace ldt::compression
