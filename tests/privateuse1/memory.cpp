// Tracks blocks from their allocation until long after they are freed.
#include "memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "streams.h"

namespace ldt::test_device {
namespace {

constexpr size_t kMostKept = size_t{128} << 20;  // freed bytes that are still watched

struct Block {
  Block(size_t size, Stream& owner) : data(c10::alloc_cpu(size)), bytes(size), home(owner) {
    std::memset(data, kPoison, bytes);
  }
  ~Block() { c10::free_cpu(data); }

  bool is_untouched() const {
    const auto* begin = static_cast<const unsigned char*>(data);
    return std::all_of(begin, begin + bytes, [](unsigned char byte) { return byte == kPoison; });
  }

  void* const data;
  const size_t bytes;
  Stream& home;
  std::mutex mutex;
  std::vector<c10::Stream> users;  // other streams, by record_stream
};

// Blocks that were freed and poisoned, the oldest first.
class Graveyard {
 public:
  void add(std::unique_ptr<Block> block) {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes_ += block->bytes;
    blocks_.push_back(std::move(block));
    while (bytes_ > kMostKept) {
      bytes_ -= blocks_.front()->bytes;
      written_ += !blocks_.front()->is_untouched();
      blocks_.pop_front();
    }
  }
  int64_t written() {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::count_if(blocks_.begin(), blocks_.end(),
                                     [](const auto& block) { return !block->is_untouched(); });
    return written_ + found;
  }

 private:
  std::mutex mutex_;
  std::deque<std::unique_ptr<Block>> blocks_;
  size_t bytes_ = 0;
  int64_t written_ = 0;
};

Graveyard& graveyard() {
  static auto* all = new Graveyard;
  return *all;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  const auto bury = [block] {
    std::memset(block->data, kPoison, block->bytes);
    graveyard().add(std::unique_ptr<Block>(block));
  };
  if (block->users.empty()) {
    block->home.enqueue_beside(bury);
    return;
  }
  // The home stream does not wait: the allocator's own stream waits for all users.
  auto& last = new_stream(block->users.front().device_index());
  last.wait(block->home.record());
  for (const auto& user : block->users) last.wait(stream(user).record());
  last.enqueue_beside(bury);
}

class PoisoningAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = c10::impl::VirtualGuardImpl(kType).getDevice();
    if (bytes == 0) return c10::DataPtr(nullptr, device);
    auto* block = new Block(bytes, current_stream(device.index()));
    return c10::DataPtr(block->data, block, &free_block, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

// Remembers which memory it gave out.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return c10::DataPtr(nullptr, c10::kCPU);
    auto* address = c10::alloc_cpu(bytes);
    std::memset(address, kPoison, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_[static_cast<const char*>(address)] = static_cast<const char*>(address) + bytes;
    return c10::DataPtr(address, address, raw_deleter(), c10::kCPU);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool gave(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = ends_.upper_bound(static_cast<const char*>(address));
    return after != ends_.begin() && address < std::prev(after)->second;
  }

 private:
  static void free_pinned(void* address);

  std::mutex mutex_;
  std::map<const char*, const char*> ends_;  // by begin
};

PinnedAllocator& pinned() {
  static auto* made = new PinnedAllocator;
  return *made;
}

void PinnedAllocator::free_pinned(void* address) {
  const std::lock_guard<std::mutex> lock(pinned().mutex_);
  pinned().ends_.erase(static_cast<const char*>(address));
  c10::free_cpu(address);
}

}  // namespace

c10::Allocator* allocator() {
  static auto* made = new PoisoningAllocator;
  return made;
}

c10::Allocator* pinned_allocator() { return &pinned(); }
bool is_pinned(const void* address) { return pinned().gave(address); }

c10::intrusive_ptr<c10::StorageImpl> make_storage(c10::StorageImpl::use_byte_size_t kind,
                                                  c10::SymInt bytes, c10::DataPtr memory,
                                                  c10::Allocator* allocator, bool resizable) {
  if (!memory && allocator != nullptr) memory = allocator->allocate(bytes.expect_int());
  return c10::make_intrusive<DeviceStorage>(kind, std::move(bytes), std::move(memory), allocator,
                                            resizable);
}

void check_storage(const c10::Storage& storage) {
  TORCH_CHECK(dynamic_cast<DeviceStorage*>(storage.unsafeGetStorageImpl()) != nullptr,
              "a tensor on npu: expected a storage of the device's own kind, got c10's plain one; "
              "make it with c10::make_storage_impl");
}

void note_use(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (memory.get_deleter() != &free_block) return;  // memory of another allocator, such as a pool
  auto* block = static_cast<Block*>(memory.get_context());
  std::lock_guard<std::mutex> lock(block->mutex);
  if (stream != block->home.handle()) block->users.push_back(stream);
}

int64_t writes_after_free() { return graveyard().written(); }

}  // namespace ldt::test_device
