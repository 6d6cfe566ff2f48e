// Scans by kernels where there are some, else after one copy to the host.
#include "metadata/device/device_rows.h"

#include <utility>

#include "metadata/device/device_scan.h"
#include "metadata/device/fetch.h"
#include "metadata/device/step_tensors.h"
#include "metadata/format/error.h"
#include "metadata/host/host_rows.h"

namespace ldt::metadata {
namespace {

c10::Device device_of(const Tensors& tensors) {
  std::optional<c10::Device> device;
  for (const auto& tensor : tensors) {
    if (tensor->is_cpu()) continue;
    if (device && tensor->device() != *device) {
      fail("metadata: expected tensors on the CPU and one device, got some on ", device->str(),
           " and some on ", tensor->device().str(), "; move them to one");
    }
    device = tensor->device();
  }
  return *device;
}

class FetchedRows final : public HostRows {
 public:
  FetchedRows(const Content& content, std::vector<const void*> data, Fetched fetched)
      : HostRows(content, std::move(data)), fetched_(std::move(fetched)) {}

 private:
  Fetched fetched_;
};

std::unique_ptr<RowFactsSource> fetch_all(const Content& content, const Tensors& tensors) {
  std::vector<at::Tensor> away;
  for (const auto& tensor : tensors) {
    if (!tensor->is_cpu()) away.push_back(*tensor);
  }
  Fetched fetched = fetch(away);
  std::vector<const void*> data;
  size_t next = 0;
  for (const auto& tensor : tensors) {
    data.push_back(tensor->is_cpu() ? tensor->const_data_ptr() : fetched.data[next++]);
  }
  return std::make_unique<FetchedRows>(content, std::move(data), std::move(fetched));
}

}  // namespace

std::unique_ptr<RowFactsSource> scan_on_device(const Content& content, const Tensors& tensors) {
  const c10::Device device = device_of(tensors);
  if (has_kernels(device)) return scan_with_kernels(content, tensors, device);
  return fetch_all(content, tensors);
}

}  // namespace ldt::metadata
