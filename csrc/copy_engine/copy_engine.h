// What a device must be able to do so that one process writes into another one's memory of it.
#pragma once

#include <c10/core/Stream.h>

#include <string>

#include "copy_engine/message_ring.h"

namespace ldt {

/// A copy engine and stream memory operations. Written down as an interface so that the protocol
/// above it knows no vendor. All throw LaneError with the driver's own words.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;

  /// Why this device cannot do it; empty if it can.
  virtual std::string unavailable(c10::Device device) = 0;

  struct Memory {
    void* address = nullptr;
    MemoryHandle handle{};
  };
  /// Memory that other processes on this host may map.
  virtual Memory allocate(c10::Device device, size_t bytes) = 0;
  virtual void free(c10::Device device, void* address) noexcept = 0;
  /// Another process's memory, for copies that `device` does.
  virtual void* map(c10::Device device, const MemoryHandle& handle, size_t bytes) = 0;
  virtual void unmap(c10::Device device, void* address) noexcept = 0;
  /// Lets streams of `device` wait for and write to flags in these pages.
  virtual void register_host(c10::Device device, void* pages, size_t bytes) = 0;
  virtual void unregister_host(c10::Device device, void* pages) noexcept = 0;

  // Enqueued on `stream`, which is what makes them cheap: no host work when their turn comes, no
  // kernel.
  virtual void copy(const c10::Stream& stream, void* target, const void* source, size_t bytes) = 0;
  /// Goes on when the flag's word, as a signed number, is `count` or more.
  virtual void wait_for(const c10::Stream& stream, const Flag& flag, uint64_t count) = 0;
  /// Goes on when the flag's count is `count` or more.
  virtual void wait_for_count(const c10::Stream& stream, const Flag& flag, uint64_t count) = 0;
  /// Sets the flag's count, after everything before on the stream is visible to all devices.
  virtual void write(const c10::Stream& stream, Flag& flag, uint64_t count) = 0;

  /// Whether what is enqueued is being captured into a graph instead of being run.
  virtual bool is_capturing(const c10::Stream& stream) = 0;
};

/// That of CUDA is built in. A library that is loaded may bring one for another type, in a function
/// `extern "C" ldt::CopyEngine* ldt_peer_device_<type>()` with the type's name in small letters,
/// such as privateuseone. Null if there is none.
CopyEngine* find_copy_engine(c10::DeviceType type);

}  // namespace ldt
