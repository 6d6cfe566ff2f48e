// Streams that lanes work on.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ldt {

/// High priority: a transfer that is ready should not queue behind the kernels it is meant to hide
/// behind.
inline c10::Stream new_lane_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

/// What the backend's own functions take.
inline void* native(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(stream.device_type()).getStreamNativeHandle(stream);
}

}  // namespace ldt
