// A c10d::Work that a lane's worker thread completes. wait() blocks the host.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>

#include "common/owner_process.h"
#include "common/stats.h"

namespace ldt {

/// One message of a host lane: a send, a receive, or a receive with its broadcast.
///
/// wait() only waits: any number of times, from any thread, and after an error, which it throws
/// each time. Ctrl-C ends it. The message, not the work, keeps the tensors alive until it is done.
class HostWork final : public c10d::Work {
 public:
  HostWork(c10d::OpType type, std::string name, std::shared_ptr<LaneStats> stats);

  /// A `timeout` of zero is infinite. Throws LaneError when it expires, for a negative one, when
  /// the message failed, and in a forked child.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override;
  std::vector<at::Tensor> result() override { return {}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// For the lane: completes the work. A null error is success; later calls do nothing.
  void complete(std::exception_ptr error);

 private:
  const OwnerProcess process_;
  std::string name_;
  std::shared_ptr<LaneStats> stats_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // created on demand; guarded by mutex_
};

}  // namespace ldt
