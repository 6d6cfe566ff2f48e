// Blocks go out as tensors and come back through the tensors' deleter.
#include "lanes/receive_pool.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <limits>

#include "common/borrowed.h"
#include "common/error.h"
#include "common/wire_tensors.h"

namespace ldt {
namespace {

// A block serves a smaller message only if it wastes at most half of itself.
constexpr int64_t kMaxWaste = 2;

}  // namespace

int64_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  bool is_empty = false;
  for (const auto size : sizes) {
    if (size < 0) throw_lane_error("sizes: expected 0 or more each, got ", sizes);
    is_empty |= size == 0;
  }
  if (is_empty) return 0;
  uint64_t bytes = c10::elementSize(dtype);
  bool fits = true;
  for (const auto size : sizes) {
    fits = !c10::mul_overflows(bytes, static_cast<uint64_t>(size), &bytes) && fits;
  }
  if (!fits || bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    throw_lane_error("sizes: expected a tensor of less than 2^63 bytes, got ", dtype_name(dtype),
                     sizes);
  }
  return static_cast<int64_t>(bytes);
}

ReceivePool::ReceivePool(c10::Device device, std::optional<c10::Stream> stream, Allocate allocate)
    : device_(device),
      stream_(stream),
      allocate_(std::move(allocate)),
      events_(std::make_shared<EventPool>(device)) {}

ReceivePool::~ReceivePool() {
  if (!owner_.is_here()) return;  // the device is the parent's
  try {
    for (const auto& block : idle_) order_before_free(block);
  } catch (const std::exception&) {  // the device is gone, as at interpreter exit
  }
}

at::Tensor ReceivePool::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  if (c10::isQIntType(dtype)) {
    throw_lane_error("dtype: expected one that is not quantized, got ", dtype_name(dtype),
                     "; receive its int_repr() and its scales instead");
  }
  const auto bytes = bytes_of(sizes, dtype);
  if (bytes == 0) return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device_));
  auto block = take(bytes);
  void* address = block.memory.mutable_data_ptr();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_use_.emplace(address, std::move(block));
    peak_in_use_ = std::max(peak_in_use_, in_use_.size());
  }
  return borrowed_tensor(address, sizes, dtype, device_,
                         [pool = shared_from_this()](void* data) { pool->give_back(data); });
}

ReceivePool::Block ReceivePool::take(int64_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      const auto size = block->memory.numel();
      const bool fits = size >= bytes && size <= kMaxWaste * bytes;
      if (fits && (best == idle_.end() || size < best->memory.numel())) best = block;
    }
    if (best != idle_.end()) {
      auto block = std::move(*best);
      idle_.erase(best);
      return block;
    }
    make_room(1);
  }
  return new_block(bytes);
}

ReceivePool::Block ReceivePool::new_block(int64_t bytes) {
  c10::InferenceMode off(false);  // the block will serve training, too
  c10::OptionalStreamGuard on_lane_stream(stream_);
  Block block;
  if (allocate_) {
    block.memory = allocate_(bytes);
    block.last_use = events_->record(*stream_);
  } else {
    block.memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  }
  return block;
}

void ReceivePool::give_back(void* address) noexcept {
  if (!owner_.is_here()) return;
  std::shared_ptr<const End> last_use;
  if (stream_) {
    try {
      const c10::impl::VirtualGuardImpl backend(device_.type());
      last_use = events_->record(backend.getStream(device_));
    } catch (...) {
      // The device is gone, as at interpreter exit: drop the block instead of reusing it unordered.
      std::lock_guard<std::mutex> lock(mutex_);
      in_use_.erase(address);
      return;
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = in_use_.find(address);
  auto block = std::move(found->second);
  in_use_.erase(found);
  block.last_use = std::move(last_use);
  block.claimed = false;
  idle_.push_back(std::move(block));
  make_room(0);
}

// Drops what was idle the longest until `blocks` more are not too many: blocks of sizes that no
// longer come would pile up.
void ReceivePool::make_room(size_t blocks) {
  const auto most = std::max(peak_in_use_, in_use_.size() + blocks);
  while (!idle_.empty() && in_use_.size() + idle_.size() + blocks > most) {
    const auto oldest = idle_.begin();
    order_before_free(*oldest);
    idle_.erase(oldest);
  }
}

// The memory goes back to the lane's stream, whose next allocation may be the same memory.
void ReceivePool::order_before_free(const Block& block) {
  for (const auto& event : {block.last_receive, block.last_read, block.last_use}) {
    if (event) event->block(*stream_);
  }
}

ReceivePool::Claim ReceivePool::claim(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = in_use_.find(tensor.storage().mutable_data());
  if (found == in_use_.end()) return Claim::kForeign;
  auto& block = found->second;
  if (block.claimed) {
    if (block.last_read) block.last_read->block(*stream_);
    return Claim::kForeign;
  }
  block.claimed = true;
  auto claim = Claim::kFree;
  for (const auto& event : {block.last_receive, block.last_read, block.last_use}) {
    if (!event || event->is_reached()) continue;
    event->block(*stream_);
    claim = Claim::kPending;
  }
  return claim;
}

void ReceivePool::note_ends(const at::Tensor& tensor, std::shared_ptr<const End> received,
                            std::shared_ptr<const End> read) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = in_use_.find(tensor.storage().mutable_data());
  if (found == in_use_.end()) return;
  found->second.last_receive = std::move(received);
  found->second.last_read = std::move(read);
}

int64_t ReceivePool::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t total = 0;
  for (const auto& [address, block] : in_use_) total += block.memory.numel();
  for (const auto& block : idle_) total += block.memory.numel();
  return total;
}

}  // namespace ldt
