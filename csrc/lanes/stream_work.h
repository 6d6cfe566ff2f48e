// A c10d::Work that completes on a device. wait() orders streams.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

#include "common/event.h"
#include "common/stats.h"

namespace ldt {

class Failure;

/// One message of a stream lane. wait() makes the caller's current stream wait for the message: any
/// number of times, from any thread, on any stream of the device. It keeps no tensors alive. With a
/// deferred transport, wait() first waits on the host until the message has arrived.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10d::OpType type, c10::Device device, std::shared_ptr<const Event> done,
             std::shared_ptr<const Failure> failure, std::shared_ptr<LaneStats> stats);

  bool isCompleted() override { return done_->is_done(); }
  bool isSuccess() const override;
  /// Throws LaneError if the lane has failed. Ignores the timeout.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return {}; }

 private:
  const c10::Device device_;
  std::shared_ptr<const Event> done_;
  std::shared_ptr<const Failure> failure_;
  std::shared_ptr<LaneStats> stats_;
};

}  // namespace ldt
