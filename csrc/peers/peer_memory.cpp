// Lending blocks and finding them again.
#include "peers/peer_memory.h"

#include <algorithm>

#include "common/borrowed.h"

namespace ldt {
namespace {

// What the driver maps at least. Blocks are whole multiples, so one serves messages of about its
// size.
constexpr int64_t kGranule = int64_t{2} << 20;

int64_t rounded(int64_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

}  // namespace

PeerMemory::~PeerMemory() {
  for (const auto& block : blocks_) driver_.free(device_, block.memory.address);
}

at::Tensor PeerMemory::lend(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto best = blocks_.end();
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    const bool fits = !block->is_lent && block->bytes >= bytes;
    if (fits && (best == blocks_.end() || block->bytes < best->bytes)) best = block;
  }
  if (best == blocks_.end()) {
    const auto size = rounded(bytes);
    blocks_.push_back({driver_.allocate(device_, static_cast<size_t>(size)), size, false});
    best = std::prev(blocks_.end());
  }
  best->is_lent = true;
  return borrowed_tensor(best->memory.address, {bytes}, at::kByte, device_,
                         [self = shared_from_this()](void* data) { self->take_back(data); });
}

void PeerMemory::take_back(const void* address) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& block : blocks_) {
    if (block.memory.address == address) block.is_lent = false;
  }
}

std::optional<PeerMemory::Place> PeerMemory::place_of(const void* address) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* wanted = static_cast<const char*>(address);
  for (size_t number = 0; number < blocks_.size(); ++number) {
    const auto* begin = static_cast<const char*>(blocks_[number].memory.address);
    if (wanted >= begin && wanted < begin + blocks_[number].bytes) {
      return Place{number, wanted - begin};
    }
  }
  return std::nullopt;
}

Ledger::Block PeerMemory::exported(size_t block) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto& found = blocks_.at(block);
  return {static_cast<uint64_t>(found.bytes), found.memory.handle};
}

}  // namespace ldt
