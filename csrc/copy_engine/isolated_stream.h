// Streams that share no hardware queue with other streams in use.
#pragma once

#include <c10/core/Stream.h>

#include <memory>

#include "copy_engine/copy_engine.h"

namespace ldt {

/// A stream that belongs to one lane until release().
///
/// A device has fewer hardware queues than streams (CUDA: 8, or CUDA_DEVICE_MAX_CONNECTIONS). A
/// stream that waits for a flag blocks every stream that shares its queue, and if one of those must
/// compute what the flag depends on, both deadlock. Drivers do not tell which streams share a
/// queue, so the constructor probes: against the current stream, the default stream and those of
/// other lanes.
class IsolatedStream {
 public:
  /// Waits up to 30 s for the probed streams to become idle. Throws LaneError if every stream
  /// shares a queue with one of them.
  explicit IsolatedStream(c10::Device device);
  ~IsolatedStream();
  IsolatedStream(const IsolatedStream&) = delete;
  IsolatedStream& operator=(const IsolatedStream&) = delete;

  const c10::Stream& stream() const { return stream_; }
  /// Lets another lane take the stream. Nothing may be enqueued on it that waits for a flag.
  void release();

 private:
  c10::Stream stream_;
  bool is_taken_ = false;
};

}  // namespace ldt
