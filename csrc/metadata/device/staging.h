// Pinned host memory and device memory that a step is staged in, kept from one step to the next.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "metadata/device/cuda/kernels.h"

namespace ldt::metadata {

/// One use of a piece of staging memory, on the device's current stream: what is written to host()
/// is sent to device(), kernels read and write there, and then the host either waits for what they
/// wrote, or marks where the stream is done with the piece. It goes back to be used again once that
/// is so; a piece whose use failed does not. What is kept is freed by nobody: at exit the driver
/// may be gone, and a forked process has no use for it.
/// Every member throws MetadataError for what CUDA says is wrong, with `task` in the text.
class StagedCall {
 public:
  /// Throws while a graph is captured on the stream.
  StagedCall(const char* task, c10::Device device, int64_t bytes);
  ~StagedCall();
  StagedCall(const StagedCall&) = delete;
  StagedCall& operator=(const StagedCall&) = delete;

  uint8_t* host() const { return staging_.host; }
  uint8_t* device() const { return staging_.device; }
  int index() const { return device_.index(); }
  void* stream() const { return stream_; }

  /// The first `bytes` bytes from the host to the device.
  void send(int64_t bytes);
  /// `error` is what a launcher says: null if all is well.
  void check(const char* error) const;
  /// Bytes from `offset` on from the device to the host; waits.
  void fetch(int64_t offset, int64_t bytes);
  /// The piece is free once the stream has come to here.
  void mark();

 private:
  const char* task_;
  c10::Device device_;
  void* stream_;
  Staging staging_{};
  bool settled_ = true;  // nothing on the stream uses the piece, or it is marked
};

}  // namespace ldt::metadata
