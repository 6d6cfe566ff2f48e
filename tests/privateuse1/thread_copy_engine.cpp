// The copy engine of the test device: memory that processes share, and copies and flags on a
// stream's thread.
#include "thread_copy_engine.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "common/error.h"
#include "copy_engine/copy_engine.h"
#include "copy_engine/shared_memory.h"
#include "enqueue.h"
#include "memory.h"

namespace ldt::test_device {
namespace {

class ThreadCopyEngine final : public CopyEngine {
 public:
  std::string unavailable(c10::Device /*device*/) override { return refusal_; }

  Memory allocate(c10::Device /*device*/, size_t bytes) override {
    auto pages = std::make_shared<SharedMemory>(bytes);
    std::memset(pages->data(), kPoison, bytes);
    Memory memory;
    memory.address = pages->data();
    const auto& handle = pages->handle();
    TORCH_CHECK(handle.size() < memory.handle.size(), "too long for a handle: ", handle);
    std::copy(handle.begin(), handle.end(), memory.handle.begin());
    keep(std::move(pages));
    return memory;
  }

  void free(c10::Device /*device*/, void* address) noexcept override { drop(address); }

  void* map(c10::Device /*device*/, const MemoryHandle& handle, size_t /*bytes*/) override {
    auto pages = std::make_shared<SharedMemory>(reinterpret_cast<const char*>(handle.data()));
    auto* address = pages->data();
    keep(std::move(pages));
    return address;
  }

  void unmap(c10::Device /*device*/, void* address) noexcept override { drop(address); }
  void register_host(c10::Device /*device*/, void* /*pages*/, size_t /*bytes*/) override {}
  void unregister_host(c10::Device /*device*/, void* /*pages*/) noexcept override {}

  void copy(const c10::Stream& stream, void* target, const void* source, size_t bytes) override {
    enqueue(stream, [=] { std::memcpy(target, source, bytes); });
  }

  void wait_for(const c10::Stream& stream, const Flag& flag, uint64_t count) override {
    enqueue(stream, [&flag, count] { spin([&] { return flag.has_reached(count); }); });
  }

  void wait_for_count(const c10::Stream& stream, const Flag& flag, uint64_t count) override {
    enqueue(stream, [&flag, count] { spin([&] { return flag.has_counted(count); }); });
  }

  void write(const c10::Stream& stream, Flag& flag, uint64_t count) override {
    enqueue(stream, [&flag, count] { flag.count.store(static_cast<uint32_t>(count)); });
  }

  bool is_capturing(const c10::Stream& /*stream*/) override { return false; }

  void refuse(std::string why) { refusal_ = std::move(why); }

 private:
  static void enqueue(const c10::Stream& stream, std::function<void()> work) {
    ldt_test_enqueue(stream.device_index(), stream.id(), std::move(work));
  }

  template <typename Condition>
  static void spin(const Condition& condition) {
    while (!condition()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  void keep(std::shared_ptr<SharedMemory> pages) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* const address = pages->data();
    pages_[address] = std::move(pages);
  }

  void drop(void* address) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    pages_.erase(address);
  }

  std::string refusal_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<SharedMemory>> pages_;
};

ThreadCopyEngine& thread_copy_engine() {
  static auto* const made = new ThreadCopyEngine;
  return *made;
}

}  // namespace

void refuse_copy_engine(const std::string& why) { thread_copy_engine().refuse(why); }

}  // namespace ldt::test_device

// find_copy_engine() looks this up by the device name that the tests use.
extern "C" LDT_TEST_EXPORT ldt::CopyEngine* ldt_copy_engine_npu() {
  return &ldt::test_device::thread_copy_engine();
}
