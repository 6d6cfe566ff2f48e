// A c10d work whose end is an event on a lane's stream; wait() orders streams and never blocks the
// host.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

namespace ldt {

class Failure;

/// One message of a stream lane. wait() makes the caller's current stream wait for the lane's end
/// event; as often as wanted, from any thread, under any stream of the device. It holds no tensors.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(c10d::OpType type, std::shared_ptr<const c10::Event> end,
             std::shared_ptr<const Failure> failure);

  bool isCompleted() override { return end_->query(); }
  bool isSuccess() const override;
  /// Throws LaneError if the lane has failed. The timeout is the backend's business: the host does
  /// not wait.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return {}; }

 private:
  std::shared_ptr<const c10::Event> end_;
  std::shared_ptr<const Failure> failure_;
};

}  // namespace ldt
