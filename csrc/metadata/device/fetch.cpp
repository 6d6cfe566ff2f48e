// Gathers tensors of several types as bytes, the widest elements first, so that each is aligned.
#include "metadata/device/fetch.h"

#include <algorithm>
#include <numeric>

namespace ldt::metadata {

Fetched fetch(const std::vector<at::Tensor>& tensors) {
  Fetched fetched;
  fetched.data.resize(tensors.size());
  if (tensors.empty()) return fetched;
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t left, size_t right) {
    return tensors[left].element_size() > tensors[right].element_size();
  });
  std::vector<at::Tensor> bytes;
  for (const size_t index : order) {
    bytes.push_back(tensors[index].view({-1}).view(at::kByte));
  }
  const at::Tensor gathered = at::cat(bytes);
  fetched.buffer = staging_bytes(gathered.numel(), gathered.device());
  fetched.buffer.copy_(gathered);
  const auto* next = fetched.buffer.const_data_ptr<uint8_t>();
  for (const size_t index : order) {
    fetched.data[index] = next;
    next += tensors[index].nbytes();
  }
  return fetched;
}

at::Tensor staging_bytes(int64_t bytes, c10::Device device) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
}

}  // namespace ldt::metadata
