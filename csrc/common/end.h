// The end of something that is enqueued on a device.
#pragma once

#include <c10/core/Stream.h>

namespace ldt {

/// Streams can wait for it, and the host can ask. Any number of times, from any thread.
class End {
 public:
  virtual ~End() = default;
  virtual bool is_reached() const = 0;
  /// What is enqueued on `stream` after this happens after the end.
  virtual void block(const c10::Stream& stream) const = 0;
};

}  // namespace ldt
