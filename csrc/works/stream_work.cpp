// Making the caller's stream wait.
#include "works/stream_work.h"

#include "common/failure.h"

namespace ldt {

StreamWork::StreamWork(c10d::OpType type, std::shared_ptr<const c10::Event> end,
                       std::shared_ptr<const Failure> failure)
    : Work(-1, type), end_(std::move(end)), failure_(std::move(failure)) {}

bool StreamWork::isSuccess() const { return end_->query() && !failure_->happened(); }

bool StreamWork::wait(std::chrono::milliseconds /*timeout*/) {
  failure_->throw_if_happened();
  const c10::impl::VirtualGuardImpl backend(end_->device_type());
  end_->block(backend.getStream(end_->device()));
  return true;
}

}  // namespace ldt
