// Streams whose waits hold up nothing else.
#pragma once

#include <c10/core/Stream.h>

#include <memory>

#include "copy_engine/copy_engine.h"

namespace ldt {

/// A stream that is a lane's own while this lives.
///
/// A device has fewer queues than streams (CUDA: 8, or CUDA_DEVICE_MAX_CONNECTIONS), and a stream
/// that waits for a flag holds up all that share its queue. If those are to compute what the flag
/// waits for in the end, nothing goes on for ever. Which streams share a queue, no driver tells, so
/// it is tried: with the current stream, the device's default one and those of other lanes. Warns
/// where every stream holds up one of these.
class IsolatedStream {
 public:
  /// Waits, at most half a minute, until the streams that it looks at have nothing to do. Throws
  /// LaneError where every stream would hold up one of these.
  explicit IsolatedStream(c10::Device device);
  ~IsolatedStream();
  IsolatedStream(const IsolatedStream&) = delete;
  IsolatedStream& operator=(const IsolatedStream&) = delete;

  const c10::Stream& stream() const { return stream_; }

 private:
  c10::Stream stream_;
};

}  // namespace ldt
