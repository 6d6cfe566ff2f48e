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

}  // namespace ldt
