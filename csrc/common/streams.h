// Streams of any device.
#pragma once

#include <c10/core/Stream.h>

#include "common/torch_private.h"

namespace ldt {

inline c10::Stream current_stream(c10::Device device) {
  return torch_private::DeviceStreams(device.type()).getStream(device);
}

inline c10::Stream default_stream(c10::Device device) {
  return torch_private::DeviceStreams(device.type()).getDefaultStream(device);
}

/// A high-priority stream of torch's pool: a transfer that is ready must not queue behind the
/// kernels that it is meant to overlap with.
inline c10::Stream new_lane_stream(c10::Device device) {
  return torch_private::DeviceStreams(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

/// The backend's own handle, such as a cudaStream_t.
inline void* native_handle(const c10::Stream& stream) {
  return torch_private::DeviceStreams(stream.device_type()).getStreamNativeHandle(stream);
}

}  // namespace ldt
