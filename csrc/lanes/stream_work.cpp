// Makes the caller's stream wait.
#include "lanes/stream_work.h"

#include <optional>

#include "common/failure.h"
#include "common/streams.h"

namespace ldt {

StreamWork::StreamWork(c10d::OpType type, c10::Device device, std::shared_ptr<const Event> done,
                       std::shared_ptr<const Failure> failure, std::shared_ptr<LaneStats> stats)
    : Work(-1, type),
      device_(device),
      done_(std::move(done)),
      failure_(std::move(failure)),
      stats_(std::move(stats)) {}

bool StreamWork::isSuccess() const { return done_->is_done() && !failure_->happened(); }

bool StreamWork::wait(std::chrono::milliseconds /*timeout*/) {
  failure_->throw_if_happened();
  std::optional<ScopedTimer> timer;
  if (!done_->is_recorded()) timer.emplace(stats_->wait_nanoseconds);
  done_->block(current_stream(device_));
  failure_->throw_if_happened();  // meanwhile
  return true;
}

}  // namespace ldt
