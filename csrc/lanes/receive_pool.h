// Memory for what a lane receives, reused from message to message.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "common/event_pool.h"

namespace ldt {

/// Blocks of memory that are handed out as fresh tensors and come back when the last reference to
/// one dies, in autograd's graph too. There are never more blocks than were in use at once, so the
/// pool is bounded by the plan. On a device, a block comes back with an event on the then current
/// stream, and `wait_until_free` makes the lane's stream wait for just that: a receive that is
/// issued early must not wait for all the compute that is queued before it. Outlives its lane while
/// tensors are out.
class ReceivePool : public std::enable_shared_from_this<ReceivePool> {
 public:
  /// `stream` is the lane's, without one on the CPU. Memory belongs to that stream.
  ReceivePool(c10::Device device, std::optional<c10::Stream> stream);

  /// A tensor with undefined contents. Zero elements take no block.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);
  /// If `tensor` is over a block of this pool: makes the lane's stream wait for the block's last
  /// user. Says whether it is.
  bool wait_until_free(const at::Tensor& tensor);
  /// All memory the pool holds, in use or idle.
  int64_t bytes() const;

 private:
  struct Block {
    at::Tensor memory;                     // uint8
    std::shared_ptr<c10::Event> last_use;  // empty: never used, or on the CPU
  };

  Block take(int64_t bytes);
  void give_back(void* address) noexcept;
  void trim_idle();

  const c10::Device device_;
  const std::optional<c10::Stream> stream_;
  const std::shared_ptr<EventPool> events_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, Block> in_use_;
  std::multimap<int64_t, Block> idle_;  // by size
  size_t peak_in_use_ = 0;
};

}  // namespace ldt
