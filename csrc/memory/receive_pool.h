// Memory for what a lane receives, reused from message to message.
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
  /// Gives bytes on the device. They may be some that were given back, with work on the lane's
  /// stream that still uses them.
  using Allocate = std::function<at::Tensor(int64_t bytes)>;

  /// `stream` is the lane's, without one on the CPU. Memory belongs to that stream, and comes from
  /// torch's own allocator unless `allocate` says otherwise.
  ReceivePool(c10::Device device, std::optional<c10::Stream> stream, Allocate allocate = nullptr);
  ~ReceivePool();

  /// A tensor with undefined contents, to be received into before anything else uses it. Zero
  /// elements take no block. Throws LaneError for sizes or a dtype that cannot be.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);
  /// One for each of a message's tensors. Those that travel together (Packing) share a block, in
  /// which they lie as they travel, and which comes back when the last of them dies.
  std::vector<at::Tensor> buffers(const std::vector<std::vector<int64_t>>& sizes,
                                  const std::vector<at::ScalarType>& dtypes);
  /// Finds the block of tensors that were made together. For as long as the pool lives.
  MessageTensors::FindBlock block_finder() const;
  enum class Claim {
    kForeign,  // not of this pool, or received into before: the caller's queued work may be using
               // it
    kPending,  // the lane's stream waits for the last user of its memory
    kFree,     // nothing uses its memory
  };
  /// For each tensor of a message, whether nothing but the last user of its memory has to be waited
  /// for, before it is received into. Makes the lane's stream wait for that one.
  std::vector<Claim> claim(const std::vector<at::Tensor>& tensors);
  /// That a claimed tensor is received into until `received`, and its memory read by others until
  /// `read` (empty: by none): it may come back before that.
  void note_events(const at::Tensor& tensor, std::shared_ptr<const Event> received,
                   std::shared_ptr<const Event> read);
  /// All memory the pool holds, in use or idle.
  int64_t bytes() const;

 private:
  struct Block {
    at::Tensor memory;  // uint8
    // What the next receive into it has to wait for. Empty: nothing.
    std::shared_ptr<const Event> last_use;
    std::shared_ptr<const Event> last_receive;
    std::shared_ptr<const Event> last_read;
    bool claimed = false;  // received into since it was handed out
  };
  /// A block that is out.
  struct Loan {
    Block block;
    size_t tensors = 0;              // that live
    std::vector<c10::Stream> users;  // that were current when others died
    bool is_lost = false;            // one of these is not known
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
  std::unordered_map<void*, std::shared_ptr<Loan>> in_use_;  // by the tensors' addresses
  std::unordered_set<Loan*> loans_;
  std::vector<Block> idle_;  // the longest idle first
  size_t peak_in_use_ = 0;
};

}  // namespace ldt
