// A c10d work that a lane's worker thread completes; wait() blocks the host.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>

#include "common/owner_process.h"
#include "common/stats.h"

namespace ldt {

/// One message of a host lane: a send, a receive, or a receive with the broadcast behind it.
///
/// wait() only waits: as often as wanted, from any thread, also after an error (which it throws
/// each time). It notices Ctrl-C. It holds no tensors; the message does, until it is done.
class HostWork final : public c10d::Work {
 public:
  HostWork(c10d::OpType type, std::string name, std::shared_ptr<LaneStats> stats);

  /// `timeout` of zero means: as long as it takes. Throws LaneError when it passes, for a
  /// negative one, when the message failed, or in a forked child.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override;
  std::vector<at::Tensor> result() override { return {}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// For the lane: ends the work, once. A null error means success; later calls do nothing.
  void complete(std::exception_ptr error);

 private:
  const OwnerProcess process_;
  std::string name_;
  std::shared_ptr<LaneStats> stats_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for; guarded by mutex_
};

}  // namespace ldt
