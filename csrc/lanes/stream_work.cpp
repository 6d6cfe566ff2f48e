// Making the caller's stream wait.
#include "lanes/stream_work.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "common/failure.h"

namespace ldt {

StreamWork::StreamWork(c10d::OpType type, c10::Device device, std::shared_ptr<const Event> end,
                       std::shared_ptr<const Failure> failure)
    : Work(-1, type), device_(device), end_(std::move(end)), failure_(std::move(failure)) {}

bool StreamWork::isSuccess() const { return end_->is_done() && !failure_->happened(); }

bool StreamWork::wait(std::chrono::milliseconds /*timeout*/) {
  failure_->throw_if_happened();
  end_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return true;
}

}  // namespace ldt
