// Memory for what a lane receives, reused from message to message.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "common/event_pool.h"

namespace ldt {

/// How many bytes such a tensor has. Throws LaneError for negative sizes and for more than 63 bits.
int64_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype);

/// Blocks of memory that are handed out as fresh tensors and come back when the last reference to
/// one dies, in autograd's graph too. There are never more blocks than were in use at once, so the
/// pool is bounded by the plan; of too many, the one that was idle the longest goes. On a device, a
/// block comes back with an event on the then current stream, and the first receive into it waits
/// for just that: a receive that is issued early must not wait for all the compute that is queued
/// before it. Outlives its lane while tensors are out.
class ReceivePool : public std::enable_shared_from_this<ReceivePool> {
 public:
  /// `stream` is the lane's, without one on the CPU. Memory belongs to that stream.
  ReceivePool(c10::Device device, std::optional<c10::Stream> stream);

  /// A tensor with undefined contents, to be received into before anything else uses it. Zero
  /// elements take no block. Throws LaneError for sizes or a dtype that cannot be.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);
  /// For a tensor of this pool that was not received into yet: makes the lane's stream wait for
  /// the block's last user, and nothing else has to be waited for. False for all other tensors,
  /// which the caller's queued work may be using.
  bool claim(const at::Tensor& tensor);
  /// All memory the pool holds, in use or idle.
  int64_t bytes() const;

 private:
  struct Block {
    at::Tensor memory;                     // uint8
    std::shared_ptr<c10::Event> last_use;  // empty: never used, or on the CPU
    bool claimed = false;                  // received into since it was handed out
  };

  Block take(int64_t bytes);
  void give_back(void* address) noexcept;
  void make_room(size_t blocks);

  const c10::Device device_;
  const std::optional<c10::Stream> stream_;
  const std::shared_ptr<EventPool> events_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, Block> in_use_;
  std::vector<Block> idle_;  // the longest idle first
  size_t peak_in_use_ = 0;
};

}  // namespace ldt
