// Pools pinned host memory and device memory for staging, reused from step to step.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "metadata/device/cuda/kernels.h"

namespace ldt::metadata {

/// One use of a piece of staging memory on the device's current stream. Write to host(), send it to
/// device(), let kernels read and write there; then either fetch() the result, which waits, or
/// mark() where the stream is done with the piece. The piece then returns to the pool; one whose
/// use failed does not. The pool is never freed: at exit the driver may be gone, and a forked child
/// has no use for it. Every member throws MetadataError with CUDA's message and `task`.
class StagedCall {
 public:
  /// Throws during a graph capture on the stream.
  StagedCall(const char* task, c10::Device device, int64_t bytes);
  ~StagedCall();
  StagedCall(const StagedCall&) = delete;
  StagedCall& operator=(const StagedCall&) = delete;

  uint8_t* host() const { return staging_.host; }
  uint8_t* device() const { return staging_.device; }
  int index() const { return device_.index(); }
  void* stream() const { return stream_; }

  /// Copies the first `bytes` bytes to the device.
  void send(int64_t bytes);
  /// Throws for a launcher's `error`; null is success.
  void check(const char* error) const;
  /// Copies bytes from `offset` to the host and waits.
  void fetch(int64_t offset, int64_t bytes);
  /// Frees the piece once the stream has reached this point.
  void mark();

 private:
  const char* task_;
  c10::Device device_;
  void* stream_;
  Staging staging_{};
  bool settled_ = true;  // nothing on the stream uses the piece, or it is marked
};

}  // namespace ldt::metadata
