// Host pages that devices read and write.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy_engine/shared_memory.h"

namespace ldt {

/// Pages that a device may access. They stay until no stream does: a stream that waits for a flag
/// in them may lag far behind their owner's end.
class RegisteredPages {
 public:
  /// Creates zeroed pages. Throws LaneError if the device has no usable copy engine.
  RegisteredPages(c10::Device device, size_t bytes);
  /// Opens those of another process.
  RegisteredPages(c10::Device device, const std::string& handle);
  ~RegisteredPages();
  RegisteredPages(const RegisteredPages&) = delete;
  RegisteredPages& operator=(const RegisteredPages&) = delete;

  void* data() const { return pages_->shared.data(); }
  size_t bytes() const { return pages_->shared.bytes(); }
  const std::string& handle() const { return pages_->shared.handle(); }
  /// Notes that `stream` uses them.
  void note_user(const c10::Stream& stream);
  /// Returns a query: whether all that is enqueued on such streams now is done.
  std::function<bool()> enqueued_is_done();

 private:
  struct Pages {
    template <typename Source>
    Pages(c10::Device device, const Source& source);
    ~Pages();

    const c10::Device device;
    SharedMemory shared;
  };

  const std::shared_ptr<Pages> pages_;
  std::mutex mutex_;
  std::vector<c10::Stream> users_;
};

}  // namespace ldt
