// Shares memory by CUDA IPC and orders streams by memory operations on host pages that both pin.
#include "copy_engine/cuda_copy_engine.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "common/error.h"
#include "common/streams.h"
#include "copy_engine/cuda_driver.h"

namespace ldt {
namespace {

// Values of cuda.h.
constexpr std::pair<int, const char*> kNeeded[] = {
    {122, "64 bit stream memory operations"},
    {91, "addresses of pinned host memory that are those of the host"},
};
constexpr unsigned kLazyPeerAccess = 1;
constexpr unsigned kRegisterPortable = 1;
constexpr unsigned kRegisterMapped = 2;
constexpr unsigned kGreaterOrEqual = 0;

class CudaCopyEngine final : public CopyEngine {
 public:
  explicit CudaCopyEngine(const CudaDriver& driver) : driver_(driver) {}

  std::string unavailable(c10::Device device) override {
    int number = 0;
    const auto result = driver_.device_get(&number, device.index());
    if (result != 0) return driver_.text_of(result);
    for (const auto& [attribute, what] : kNeeded) {
      int can = 0;
      driver_.check(driver_.device_get_attribute(&can, attribute, number), "cuDeviceGetAttribute");
      if (can == 0) return c10::str(device, " has no ", what);
    }
    return "";
  }

  Memory allocate(c10::Device device, size_t bytes) override {
    const auto context = in(device);
    CudaDriver::Address address = 0;
    CudaDriver::IpcHandle handle{};
    const auto result = driver_.allocate(&address, bytes);
    if (result != 0) {
      throw_lane_error("memory for what a lane receives: ", device, " could not give ", bytes,
                       " bytes: ", driver_.text_of(result),
                       "; free some, for example with torch.cuda.empty_cache()");
    }
    const auto exported = driver_.get_ipc_handle(&handle, address);
    if (exported != 0) driver_.free(address);
    driver_.check(exported, "cuIpcGetMemHandle");
    Memory memory;
    memory.address = reinterpret_cast<void*>(address);
    std::copy(std::begin(handle.bytes), std::end(handle.bytes), memory.handle.begin());
    return memory;
  }

  void free(c10::Device device, void* address) noexcept override {
    warn_on_error(device, [&] { driver_.check(driver_.free(to_address(address)), "cuMemFree"); });
  }

  void* map(c10::Device device, const MemoryHandle& handle, size_t /*bytes*/) override {
    const auto context = in(device);
    CudaDriver::IpcHandle opaque{};
    std::copy(handle.begin(), handle.end(), std::begin(opaque.bytes));
    CudaDriver::Address address = 0;
    driver_.check(driver_.open_ipc_handle(&address, opaque, kLazyPeerAccess), "cuIpcOpenMemHandle");
    return reinterpret_cast<void*>(address);
  }

  void unmap(c10::Device device, void* address) noexcept override {
    warn_on_error(device, [&] {
      driver_.check(driver_.close_ipc_handle(to_address(address)), "cuIpcCloseMemHandle");
    });
  }

  void register_host(c10::Device device, void* pages, size_t bytes) override {
    const auto context = in(device);
    driver_.check(driver_.register_host(pages, bytes, kRegisterPortable | kRegisterMapped),
                  "cuMemHostRegister");
  }

  void unregister_host(c10::Device device, void* pages) noexcept override {
    warn_on_error(device,
                  [&] { driver_.check(driver_.unregister_host(pages), "cuMemHostUnregister"); });
  }

  void copy(const c10::Stream& stream, void* target, const void* source, size_t bytes) override {
    const auto context = in(stream.device());
    driver_.check(
        driver_.copy(to_address(target), to_address(source), bytes, native_handle(stream)),
        "cuMemcpyAsync");
  }

  void wait_for(const c10::Stream& stream, const Flag& flag, uint64_t count) override {
    const auto context = in(stream.device());
    driver_.check(
        driver_.wait_value64(native_handle(stream), to_address(&flag), count, kGreaterOrEqual),
        "cuStreamWaitValue64");
  }

  void wait_for_count(const c10::Stream& stream, const Flag& flag, uint64_t count) override {
    const auto context = in(stream.device());
    driver_.check(driver_.wait_value32(native_handle(stream), to_address(&flag),
                                       static_cast<uint32_t>(count), kGreaterOrEqual),
                  "cuStreamWaitValue32");
  }

  void write(const c10::Stream& stream, Flag& flag, uint64_t count) override {
    const auto context = in(stream.device());
    const auto low = static_cast<uint32_t>(count);
    // Writes the lower half only, so that a released flag stays released; every 2^32 counts it has
    // to write both.
    const auto result =
        low != 0 ? driver_.write_value32(native_handle(stream), to_address(&flag), low, 0)
                 : driver_.write_value64(native_handle(stream), to_address(&flag), count, 0);
    driver_.check(result, "cuStreamWriteValue");
  }

  bool is_capturing(const c10::Stream& stream) override {
    // The default stream cannot be captured; asking about it would sync with all others.
    if (native_handle(stream) == nullptr) return false;
    int status = 0;
    driver_.check(driver_.is_capturing(native_handle(stream), &status), "cuStreamIsCapturing");
    return status != 0;
  }

 private:
  static CudaDriver::Address to_address(const void* pointer) {
    return reinterpret_cast<CudaDriver::Address>(pointer);
  }

  // The driver works in the current thread's context, and a fresh thread has none. Makes torch's,
  // the primary context, current, and restores the previous one at the end.
  class InContext {
   public:
    InContext(const CudaDriver& driver, CudaDriver::Context context) : driver_(driver) {
      driver_.check(driver_.get_current_context(&before_), "cuCtxGetCurrent");
      changed_ = before_ != context;
      if (changed_) driver_.check(driver_.set_current_context(context), "cuCtxSetCurrent");
    }
    ~InContext() {
      if (changed_) driver_.set_current_context(before_);
    }

   private:
    const CudaDriver& driver_;
    CudaDriver::Context before_ = nullptr;
    bool changed_ = false;
  };

  InContext in(c10::Device device) { return InContext(driver_, primary_context(device)); }

  CudaDriver::Context primary_context(c10::Device device) {
    auto& context = contexts_.at(static_cast<size_t>(device.index()));
    const std::lock_guard<std::mutex> lock(mutex_);
    if (context == nullptr) {
      int number = 0;
      driver_.check(driver_.device_get(&number, device.index()), "cuDeviceGet");
      driver_.check(driver_.retain_primary_context(&context, number), "cuDevicePrimaryCtxRetain");
    }
    return context;
  }

  template <typename Step>
  void warn_on_error(c10::Device device, const Step& step) noexcept {
    try {
      const auto context = in(device);
      step();
    } catch (const std::exception& error) {  // as at interpreter exit, when the driver has left
      TORCH_WARN("IPC memory of ", device, ": ", error.what());
    }
  }

  const CudaDriver& driver_;
  std::mutex mutex_;
  std::array<CudaDriver::Context, 64> contexts_{};
};

}  // namespace

CopyEngine* cuda_copy_engine() {
  static auto* const device =
      cuda_driver() == nullptr ? nullptr : new CudaCopyEngine(*cuda_driver());
  return device;
}

}  // namespace ldt
