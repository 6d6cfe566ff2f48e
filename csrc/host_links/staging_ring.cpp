// Flags on the first page, slots behind it.
#include "host_links/staging_ring.h"

#include <new>

#include "memory/external_tensor.h"

namespace ldt {
namespace {

constexpr size_t kFlagBytes = 4096;

}  // namespace

StagingRing::StagingRing(c10::Device device)
    : pages_(device, kFlagBytes + kSlots * static_cast<size_t>(kSlotBytes)),
      flags_(new (pages_.data()) Flags) {
  static_assert(sizeof(Flags) <= kFlagBytes);
}

char* StagingRing::slot(uint64_t piece) const {
  return static_cast<char*>(pages_.data()) + kFlagBytes + piece % kSlots * kSlotBytes;
}

at::Tensor StagingRing::bytes_of(uint64_t piece, int64_t bytes) {
  return external_tensor(slot(piece), {bytes}, at::kByte, at::kCPU,
                         [self = shared_from_this()](void*) {});
}

}  // namespace ldt
