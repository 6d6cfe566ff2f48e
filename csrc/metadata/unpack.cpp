// Decodes, rebuilds the rows in one buffer, and makes views of it.
#include "metadata/unpack.h"

#include "common/torch_private.h"
#include "metadata/codec/decoder.h"
#include "metadata/device/device_rebuild.h"
#include "metadata/device/device_scan.h"
#include "metadata/format/error.h"
#include "metadata/host/rebuild.h"
#include "metadata/torch_types.h"

namespace ldt::metadata {
namespace {

// A contiguous view of the buffer from byte `offset`, made without a dispatched operator, as a step
// has a hundred of them.
at::Tensor view_of(const at::Tensor& buffer, int64_t offset, const Form& form) {
  auto view =
      torch_private::make_tensor(buffer.storage(), buffer.key_set(), torch_dtype(form.dtype));
  torch_private::set_contiguous(view, form.shape, offset / kDTypes[form.dtype].bytes);
  return view;
}

at::Tensor empty_bytes(int64_t bytes, bool pinned) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(pinned));
}

at::Tensor rebuild_on_host(const Decoded& decoded, bool pinned) {
  auto buffer = empty_bytes(decoded.bytes, pinned);
  auto* bytes = buffer.data_ptr<uint8_t>();
  const RowLists lists = decoded.plans.lists();
  for (const RowPlan& row : decoded.plans.rows) rebuild_row(row, lists, bytes);
  return buffer;
}

at::Tensor rebuild(const Decoded& decoded, c10::Device device) {
  if (device.is_meta()) return at::empty({decoded.bytes}, at::dtype(at::kByte).device(device));
  if (device.is_cpu()) return rebuild_on_host(decoded, false);
  if (has_kernels(device)) return rebuild_on_device(decoded, device);
  // Only pinned memory may be freed while a copy still reads it.
  return rebuild_on_host(decoded, device.is_cuda()).to(device, /*non_blocking=*/device.is_cuda());
}

}  // namespace

Unpacked unpack(const at::Tensor& data, c10::Device device, int64_t max_elements) {
  if (!data.is_cpu() || data.scalar_type() != at::kByte || data.dim() != 1 ||
      !data.is_contiguous()) {
    fail("expected the message as a contiguous uint8 tensor of one dimension on the CPU, got ",
         c10::toString(data.scalar_type()), " of shape ", data.sizes(), " on ",
         data.device().str());
  }
  Decoded decoded =
      decode(data.const_data_ptr<uint8_t>(), static_cast<size_t>(data.numel()), max_elements);
  Unpacked unpacked;
  if (!decoded.offsets.empty()) {
    const at::Tensor buffer = rebuild(decoded, device);
    unpacked.tensors.reserve(decoded.offsets.size());
    for (size_t tensor = 0; tensor < decoded.offsets.size(); ++tensor) {
      const Form& form = decoded.content.forms[decoded.content.form_numbers[tensor]];
      unpacked.tensors.push_back(view_of(buffer, decoded.offsets[tensor], form));
    }
  }
  unpacked.content = std::move(decoded.content);
  return unpacked;
}

}  // namespace ldt::metadata
