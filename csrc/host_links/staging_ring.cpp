// Flags on the first page, slots behind it.
#include "host_links/staging_ring.h"

#include <algorithm>
#include <new>

#include "memory/external_tensor.h"

namespace ldt {
namespace {

constexpr size_t kFlagBytes = 4096;
constexpr int64_t kPieces = 16;
constexpr int64_t kLeastPieceBytes = int64_t{1} << 20;
constexpr int64_t kAlignment = int64_t{64} << 10;

}  // namespace

StagingRing::StagingRing(c10::Device device)
    : pages_(device, kFlagBytes + kSlots * static_cast<size_t>(kSlotBytes)),
      flags_(new (pages_.data()) Flags) {
  static_assert(sizeof(Flags) <= kFlagBytes);
}

int64_t StagingRing::piece_bytes(int64_t message_bytes) {
  const auto share = (message_bytes + kPieces - 1) / kPieces;
  const auto aligned = (share + kAlignment - 1) / kAlignment * kAlignment;
  return std::clamp(aligned, kLeastPieceBytes, kSlotBytes);
}

char* StagingRing::slot(uint64_t piece) const {
  return static_cast<char*>(pages_.data()) + kFlagBytes + piece % kSlots * kSlotBytes;
}

at::Tensor StagingRing::bytes_of(uint64_t piece, int64_t bytes) {
  return external_tensor(slot(piece), {bytes}, at::kByte, at::kCPU,
                         [self = shared_from_this()](void*) {});
}

}  // namespace ldt
