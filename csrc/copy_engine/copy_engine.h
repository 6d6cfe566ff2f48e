// What a device must offer so that one process can write to another's device memory.
#pragma once

#include <c10/core/Stream.h>

#include <string>

#include "copy_engine/message_ring.h"

namespace ldt {

/// A copy engine and stream memory operations, behind an interface so that the protocol on top is
/// independent of the vendor. Every member throws LaneError with the driver's message.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  /// Why this device cannot be used; empty if it can.
  virtual std::string unavailable(c10::Device device) = 0;

  struct Memory {
    void* address = nullptr;
    MemoryHandle handle{};
  };
  /// Memory that other processes on this host may map.
  virtual Memory allocate(c10::Device device, size_t bytes) = 0;
  virtual void free(c10::Device device, void* address) noexcept = 0;
  /// Maps another process's memory for copies by `device`.
  virtual void* map(c10::Device device, const MemoryHandle& handle, size_t bytes) = 0;
  virtual void unmap(c10::Device device, void* address) noexcept = 0;
  /// Lets streams of `device` wait for and write to flags in these pages.
  virtual void register_host(c10::Device device, void* pages, size_t bytes) = 0;
  virtual void unregister_host(c10::Device device, void* pages) noexcept = 0;

  // Enqueued on `stream`: they run without the host and without a kernel.
  virtual void copy(const c10::Stream& stream, void* target, const void* source, size_t bytes) = 0;
  /// Waits until the flag's word, as a signed number, is `count` or more.
  virtual void wait_for(const c10::Stream& stream, const Flag& flag, uint64_t count) = 0;
  /// Waits until the flag's count is `count` or more.
  virtual void wait_for_count(const c10::Stream& stream, const Flag& flag, uint64_t count) = 0;
  /// Sets the flag's count once all earlier work of the stream is visible to every device.
  virtual void write(const c10::Stream& stream, Flag& flag, uint64_t count) = 0;

  /// Whether a graph capture is active on `stream`.
  virtual bool is_capturing(const c10::Stream& stream) = 0;
};

/// The copy engine of a device type; null if there is none. CUDA's is built in. A loaded library
/// may provide another type's with a function `extern "C" ldt::CopyEngine*
/// ldt_copy_engine_<type>()`, where <type> is the lower-case name, such as privateuseone.
CopyEngine* find_copy_engine(c10::DeviceType type);
/// The copy engine of `device`. Throws LaneError that says why there is none or why it is unusable.
CopyEngine& require_copy_engine(c10::Device device);

}  // namespace ldt
