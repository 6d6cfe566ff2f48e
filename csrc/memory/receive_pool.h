// Pools the memory that a lane receives into.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "common/event_pool.h"
#include "common/owner_process.h"
#include "memory/message_tensors.h"

namespace ldt {

/// A block serves a smaller message only if it wastes at most half of itself.
inline constexpr int64_t kMaxWaste = 2;

/// The size of such a tensor. Throws LaneError for negative sizes and for 2^63 bytes or more.
int64_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype);

/// Hands out blocks of memory as fresh tensors. A block returns when the last reference to its
/// tensors dies, including autograd's. The pool never holds more blocks than its peak use, which
/// the plan bounds; it frees the least recently used surplus block. On a device, a block returns
/// with an event on the stream that is current then, and the next receive into it waits for that
/// event only: a receive posted early must not wait for all compute enqueued before it. Outlives
/// its lane while tensors are in use.
class ReceivePool : public std::enable_shared_from_this<ReceivePool> {
 public:
  /// Allocates bytes on the device. They may be freed memory that work on the lane's stream still
  /// uses.
  using Allocate = std::function<at::Tensor(int64_t bytes)>;

  /// `stream` is the lane's, empty on the CPU. Memory is allocated on that stream, by `allocate` or
  /// else by torch's allocator.
  ReceivePool(c10::Device device, std::optional<c10::Stream> stream, Allocate allocate = nullptr);
  ~ReceivePool();

  /// A tensor with undefined contents; receive into it before any other use. An empty one takes no
  /// block. Throws LaneError for invalid sizes or dtypes.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);
  /// One tensor for each of a message's. Packed ones share a block in which they lie as they are
  /// sent, and which returns when the last of them dies.
  std::vector<at::Tensor> buffers(const std::vector<std::vector<int64_t>>& sizes,
                                  const std::vector<at::ScalarType>& dtypes);
  /// Finds the block of tensors that buffers() made together. Valid while the pool lives.
  MessageTensors::FindBlock block_finder() const;
  enum class Claim {
    kForeign,  // not of this pool, or received into before: enqueued work of the caller may use it
    kPending,  // the lane's stream waits for the last user of its memory
    kFree,     // nothing uses its memory
  };
  /// What has to happen before each tensor of a message is received into. Makes the lane's stream
  /// wait for the last user of each pooled block.
  std::vector<Claim> claim(const std::vector<at::Tensor>& tensors);
  /// Records that a claimed tensor is received into until `received`, and that other processes read
  /// its memory until `read` (null: none does). The block may return earlier.
  void note_events(const at::Tensor& tensor, std::shared_ptr<const Event> received,
                   std::shared_ptr<const Event> read);
  /// All memory of the pool, in use or idle.
  int64_t bytes() const;

 private:
  struct Block {
    at::Tensor memory;  // uint8
    // What the next receive into it waits for; null: nothing.
    std::shared_ptr<const Event> last_use;
    std::shared_ptr<const Event> last_receive;
    std::shared_ptr<const Event> last_read;
    bool claimed = false;  // received into since it was handed out
  };
  /// A block in use.
  struct Loan {
    Block block;
    size_t tensors = 0;              // alive
    std::vector<c10::Stream> users;  // current when its other tensors died
    bool is_lost = false;            // one of these is unknown
  };

  Block take(int64_t bytes);
  Block new_block(int64_t bytes);
  std::shared_ptr<Loan> lend(int64_t bytes);
  at::Tensor tensor_of(const std::shared_ptr<Loan>& loan, int64_t offset, at::IntArrayRef sizes,
                       at::ScalarType dtype);
  void give_back(void* address) noexcept;
  void note_user(Loan& loan) noexcept;
  void take_back(Block block, const std::vector<c10::Stream>& users) noexcept;
  std::shared_ptr<Loan> loan_of(const at::Tensor& tensor) const;
  at::Tensor find_block(const std::vector<at::Tensor>& members, const Packing& packing) const;
  Claim claim(Block& block);
  void make_room(size_t blocks);
  void order_before_free(const Block& block);

  const OwnerProcess process_;
  const c10::Device device_;
  const std::optional<c10::Stream> stream_;
  const Allocate allocate_;
  const std::shared_ptr<EventPool> events_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<Loan>> in_use_;  // by tensor address
  std::unordered_set<Loan*> loans_;
  std::vector<Block> idle_;  // least recently used first
  size_t peak_in_use_ = 0;
};

}  // namespace ldt
