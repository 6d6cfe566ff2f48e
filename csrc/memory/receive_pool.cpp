// Blocks leave as tensors and return through the tensors' deleter.
#include "memory/receive_pool.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <limits>

#include "common/error.h"
#include "common/streams.h"
#include "common/tensor_info.h"
#include "memory/external_tensor.h"
#include "memory/message_tensors.h"

namespace ldt {

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
  if (!process_.is_current()) return;  // the parent owns the device
  try {
    for (const auto& block : idle_) order_before_free(block);
  } catch (...) {  // the device is gone, as at interpreter exit
  }
}

at::Tensor ReceivePool::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return buffers({sizes.vec()}, {dtype}).front();
}

std::vector<at::Tensor> ReceivePool::buffers(const std::vector<std::vector<int64_t>>& sizes,
                                             const std::vector<at::ScalarType>& dtypes) {
  TORCH_CHECK_VALUE(sizes.size() == dtypes.size(), "expected a dtype for each of ", sizes.size(),
                    " sizes, got ", dtypes.size());
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (c10::isQIntType(dtypes[i])) {
      throw_lane_error("dtype: expected one that is not quantized, got ", dtype_name(dtypes[i]),
                       "; receive its int_repr() and its scales instead");
    }
    bytes.push_back(bytes_of(sizes[i], dtypes[i]));
  }
  const auto packing = Packing::of(bytes, device_);
  const auto block = packing.members.empty() ? nullptr : lend(packing.bytes);
  std::vector<at::Tensor> tensors;
  size_t member = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (bytes[i] == 0) {
      const auto options = at::TensorOptions().dtype(dtypes[i]).device(device_);
      tensors.push_back(at::empty(sizes[i], options));
    } else if (member < packing.members.size() && packing.members[member] == i) {
      tensors.push_back(tensor_of(block, packing.offsets[member++], sizes[i], dtypes[i]));
    } else {
      tensors.push_back(tensor_of(lend(bytes[i]), 0, sizes[i], dtypes[i]));
    }
  }
  return tensors;
}

std::shared_ptr<ReceivePool::Loan> ReceivePool::lend(int64_t bytes) {
  auto loan = std::make_shared<Loan>();
  loan->block = take(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  loans_.insert(loan.get());
  peak_in_use_ = std::max(peak_in_use_, loans_.size());
  return loan;
}

// Every tensor has its own storage, so that autograd sees no overlap.
at::Tensor ReceivePool::tensor_of(const std::shared_ptr<Loan>& loan, int64_t offset,
                                  at::IntArrayRef sizes, at::ScalarType dtype) {
  auto* const address = static_cast<char*>(loan->block.memory.mutable_data_ptr()) + offset;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    in_use_.emplace(address, loan);
    ++loan->tensors;
  }
  return external_tensor(address, sizes, dtype, device_,
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
  c10::InferenceMode off(false);  // training will use the block, too
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
  if (!process_.is_current()) return;
  std::shared_ptr<Loan> loan;  // freed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = in_use_.find(address);
  loan = std::move(found->second);
  in_use_.erase(found);
  note_user(*loan);
  if (--loan->tensors > 0) return;
  loans_.erase(loan.get());
  if (!loan->is_lost) take_back(std::move(loan->block), loan->users);
}

void ReceivePool::note_user(Loan& loan) noexcept {
  if (!stream_) return;
  try {
    const auto user = current_stream(device_);
    auto& users = loan.users;
    if (std::find(users.begin(), users.end(), user) == users.end()) users.push_back(user);
  } catch (...) {  // the device is gone, as at interpreter exit
    loan.is_lost = true;
  }
}

void ReceivePool::take_back(Block block, const std::vector<c10::Stream>& users) noexcept {
  try {
    block.last_use = nullptr;
    for (const auto& user : users) {
      std::shared_ptr<const Event> event = events_->record(user);
      block.last_use = block.last_use ? std::make_shared<BothEvents>(block.last_use, event) : event;
    }
    block.claimed = false;
    idle_.push_back(std::move(block));
    make_room(0);
  } catch (...) {  // the device is gone: drop the block rather than reuse it unordered
  }
}

// Frees the least recently used blocks until there is room for `blocks` more, as blocks of sizes
// that no longer occur would pile up.
void ReceivePool::make_room(size_t blocks) {
  const auto most = std::max(peak_in_use_, loans_.size() + blocks);
  for (auto oldest = idle_.begin();
       oldest != idle_.end() && loans_.size() + idle_.size() + blocks > most;) {
    if (oldest->last_receive && !oldest->last_receive->is_recorded()) {
      ++oldest;  // dropped while it was received into: ordering it would make the host wait
      continue;
    }
    order_before_free(*oldest);
    oldest = idle_.erase(oldest);
  }
}

// The lane's stream must wait for the last uses: its next allocation may reuse the memory.
void ReceivePool::order_before_free(const Block& block) {
  for (const auto& event : {block.last_receive, block.last_read, block.last_use}) {
    if (event) event->block(*stream_);
  }
}

std::shared_ptr<ReceivePool::Loan> ReceivePool::loan_of(const at::Tensor& tensor) const {
  const auto found = in_use_.find(tensor.storage().mutable_data());
  return found == in_use_.end() ? nullptr : found->second;
}

MessageTensors::FindBlock ReceivePool::block_finder() const {
  return [this](const std::vector<at::Tensor>& members, const Packing& packing) {
    return find_block(members, packing);
  };
}

at::Tensor ReceivePool::find_block(const std::vector<at::Tensor>& members,
                                   const Packing& packing) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto loan = loan_of(members.front());
  if (!loan || loan->block.memory.numel() < packing.bytes) return {};
  const auto* const begin = static_cast<const char*>(loan->block.memory.const_data_ptr());
  for (size_t i = 0; i < members.size(); ++i) {
    const bool lies_there = members[i].const_data_ptr() == begin + packing.offsets[i];
    if (!lies_there || loan_of(members[i]) != loan) return {};
  }
  return loan->block.memory.narrow(0, 0, packing.bytes);
}

std::vector<ReceivePool::Claim> ReceivePool::claim(const std::vector<at::Tensor>& tensors) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unordered_map<Loan*, Claim> claimed{{nullptr, Claim::kForeign}};
  std::vector<Claim> claims;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) {
      claims.push_back(Claim::kFree);
      continue;
    }
    const auto loan = loan_of(tensor);
    const auto known = claimed.find(loan.get());
    claims.push_back(known == claimed.end() ? claim(loan->block) : known->second);
    claimed.emplace(loan.get(), claims.back());
  }
  return claims;
}

ReceivePool::Claim ReceivePool::claim(Block& block) {
  if (block.claimed) {
    if (block.last_read) block.last_read->block(*stream_);
    return Claim::kForeign;
  }
  block.claimed = true;
  auto claim = Claim::kFree;
  for (const auto& event : {block.last_receive, block.last_read, block.last_use}) {
    // A transport enqueues receives in order, so one that it has yet to enqueue needs no wait, for
    // which the host would stop.
    if (!event || !event->is_recorded() || event->is_done()) continue;
    event->block(*stream_);
    claim = Claim::kPending;
  }
  return claim;
}

void ReceivePool::note_events(const at::Tensor& tensor, std::shared_ptr<const Event> received,
                              std::shared_ptr<const Event> read) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto loan = loan_of(tensor);
  if (!loan) return;
  loan->block.last_receive = std::move(received);
  loan->block.last_read = std::move(read);
}

int64_t ReceivePool::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t total = 0;
  for (const auto* loan : loans_) total += loan->block.memory.numel();
  for (const auto& block : idle_) total += block.memory.numel();
  return total;
}

}  // namespace ldt
