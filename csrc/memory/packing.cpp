// Chooses the members of the block and their offsets.
#include "memory/packing.h"

#include <algorithm>
#include <functional>

namespace ldt {
namespace {

// Tensors of at most this size are packed.
int64_t largest_member(std::vector<int64_t> bytes, c10::Device device) {
  if (device.is_cpu() || bytes.size() <= Packing::kMaxTransfers) return Packing::kSmallBytes;
  const auto last =
      bytes.begin() + Packing::kMaxTransfers - 1;  // larger ones are sent on their own
  std::nth_element(bytes.begin(), last, bytes.end(), std::greater<>());
  return std::max(Packing::kSmallBytes, *last);
}

int64_t aligned(int64_t bytes) {
  return (bytes + Packing::kAlignment - 1) / Packing::kAlignment * Packing::kAlignment;
}

}  // namespace

Packing Packing::of(const std::vector<int64_t>& bytes, c10::Device device) {
  if (bytes.size() < 2) return {};
  const auto largest = largest_member(bytes, device);
  Packing packing;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == 0 || bytes[i] > largest) continue;
    const auto offset = aligned(packing.bytes);
    packing.has_gaps |= offset != packing.bytes;
    packing.members.push_back(i);
    packing.offsets.push_back(offset);
    packing.bytes = offset + bytes[i];
  }
  return packing.members.size() > 1 ? packing : Packing{};
}

}  // namespace ldt
