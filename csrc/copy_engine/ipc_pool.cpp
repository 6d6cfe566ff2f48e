// Allocates blocks and finds them by address.
#include "copy_engine/ipc_pool.h"

#include <algorithm>

#include "common/streams.h"
#include "copy_engine/deferred_free.h"
#include "memory/external_tensor.h"
#include "memory/receive_pool.h"

namespace ldt {
namespace {

// The driver's mapping granularity. Blocks are multiples of it, so each serves messages of about
// its size.
constexpr int64_t kGranularity = int64_t{2} << 20;

int64_t rounded(int64_t bytes) { return (bytes + kGranularity - 1) / kGranularity * kGranularity; }

}  // namespace

IpcPool::IpcPool(c10::Device device, CopyEngine& engine)
    : device_(device), engine_(engine), blocks_(new Blocks{device, engine, {}}) {
  run_deferred_frees();  // now, as they wait for the device: during a step that might never end
}

IpcPool::Blocks::~Blocks() {
  for (const auto& block : all) engine.free(device, block.memory.address);
}

IpcPool::~IpcPool() {
  std::vector<std::shared_ptr<const Event>> last_uses;
  try {
    const auto events = std::make_shared<EventPool>(device_);
    for (const auto& block : blocks_->all) last_uses.push_back(events->record(*block.stream));
  } catch (const std::exception&) {  // the device is gone, as at interpreter exit
    return;
  }
  free_when([last_uses = std::move(last_uses)] { return all_done(last_uses); }, blocks_);
}

at::Tensor IpcPool::allocate(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto best = blocks_->all.end();
  for (auto block = blocks_->all.begin(); block != blocks_->all.end(); ++block) {
    const bool fits =
        !block->is_in_use && block->bytes >= bytes && block->bytes <= kMaxWaste * rounded(bytes);
    if (fits && (best == blocks_->all.end() || block->bytes < best->bytes)) best = block;
  }
  if (best == blocks_->all.end()) {
    const auto size = rounded(bytes);
    blocks_->all.push_back(
        {engine_.allocate(device_, static_cast<size_t>(size)), size, false, std::nullopt});
    best = std::prev(blocks_->all.end());
  }
  best->is_in_use = true;
  best->stream = current_stream(device_);
  return external_tensor(best->memory.address, {bytes}, at::kByte, device_,
                         [self = shared_from_this()](void* data) { self->take_back(data); });
}

void IpcPool::take_back(const void* address) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& block : blocks_->all) {
    if (block.memory.address == address) block.is_in_use = false;
  }
}

std::optional<IpcPool::Place> IpcPool::place_of(const void* address) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* wanted = static_cast<const char*>(address);
  for (size_t number = 0; number < blocks_->all.size(); ++number) {
    const auto* begin = static_cast<const char*>(blocks_->all[number].memory.address);
    if (wanted >= begin && wanted < begin + blocks_->all[number].bytes) {
      return Place{number, wanted - begin};
    }
  }
  return std::nullopt;
}

MessageRing::Block IpcPool::exported(size_t block) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto& found = blocks_->all.at(block);
  return {static_cast<uint64_t>(found.bytes), found.memory.handle};
}

}  // namespace ldt
