// Copies a message's plans to the device and launches the kernel.
#include "metadata/device/device_rebuild.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/torch_private.h"
#include "metadata/device/cuda/kernels.h"
#include "metadata/device/staging.h"
#include "metadata/format/error.h"

namespace ldt::metadata {

#ifdef LDT_CUDA_KERNELS
namespace {

// The offsets of the plans and their lists in one buffer.
class Payload {
 public:
  explicit Payload(const Plans& plans) : plans_(plans) {
    rows_ = place(plans.rows);
    segments_ = place(plans.segments);
    runs_ = place(plans.runs);
    values_ = place(plans.values);
    bits_ = place(plans.bits);
  }

  int64_t bytes() const { return bytes_; }
  void write(uint8_t* to) const {
    write(plans_.rows, to + rows_);
    write(plans_.segments, to + segments_);
    write(plans_.runs, to + runs_);
    write(plans_.values, to + values_);
    write(plans_.bits, to + bits_);
  }
  const RowPlan* rows(const uint8_t* at) const {
    return reinterpret_cast<const RowPlan*>(at + rows_);
  }
  RowLists lists(const uint8_t* at) const {
    return {reinterpret_cast<const Segment*>(at + segments_),
            reinterpret_cast<const Run*>(at + runs_),
            reinterpret_cast<const int64_t*>(at + values_), at + bits_};
  }

 private:
  template <typename Element>
  int64_t place(const std::vector<Element>& list) {
    const int64_t offset = bytes_;
    const auto size = static_cast<int64_t>(list.size() * sizeof(Element));
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  template <typename Element>
  static void write(const std::vector<Element>& list, uint8_t* to) {
    if (!list.empty()) std::memcpy(to, list.data(), list.size() * sizeof(Element));
  }

  const Plans& plans_;
  int64_t rows_ = 0;
  int64_t segments_ = 0;
  int64_t runs_ = 0;
  int64_t values_ = 0;
  int64_t bits_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace

at::Tensor rebuild_on_device(const Decoded& decoded, c10::Device device) {
  if (!device.has_index()) device = torch_private::DeviceStreams(device.type()).getDevice();
  const c10::DeviceGuard guard(device);
  const auto rows = static_cast<int64_t>(decoded.plans.rows.size());
  if (rows > std::numeric_limits<int>::max()) {
    fail("metadata: expected fewer than 2^31 rows for ", device.str(), ", got ", rows,
         "; unpack on the CPU");
  }
  auto buffer = at::empty({decoded.bytes}, at::TensorOptions(at::kByte).device(device));
  if (rows == 0) return buffer;
  int64_t longest = 0;
  for (const RowPlan& row : decoded.plans.rows) longest = std::max(longest, row.length);
  const Payload payload(decoded.plans);
  StagedCall call("rebuilding masks", device, payload.bytes());
  payload.write(call.host());
  call.send(payload.bytes());
  call.check(ldt_metadata_rebuild(payload.rows(call.device()), rows, longest,
                                  payload.lists(call.device()), buffer.data_ptr<uint8_t>(),
                                  call.stream()));
  call.mark();
  return buffer;
}
#else
at::Tensor rebuild_on_device(const Decoded& /*decoded*/, c10::Device device) {
  fail("ldt was built without CUDA kernels, and was asked to rebuild masks on ", device.str());
}
#endif

}  // namespace ldt::metadata
