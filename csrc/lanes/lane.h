// A lane carries channels between two nodes. Section 5 of docs/design.md has the contract.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "common/failure.h"
#include "common/message_name.h"
#include "common/owner_process.h"
#include "common/stats.h"
#include "memory/receive_pool.h"
#include "process_group/group_comm.h"

namespace ldt {

struct LaneOptions {
  std::string name;               // begins every error text, e.g. "F0:0.0->1.0"
  c10::Device device = at::kCPU;  // of the tensors of its messages
  int64_t chunk_bytes = 0;        // size of a piece: its broadcast overlaps the next receive
  // How long one message may take once it is its turn. overdue() reports where no backend does.
  std::chrono::milliseconds timeout{};
  std::vector<int> global_ranks;  // of the peers, for error texts; empty: group ranks
};

/// Carries messages first in, first out. A message is a list of tensors whose shapes both ends
/// know.
///
/// send() and receive() issue everything and return at once; the work only waits. One thread at a
/// time may use a lane, any thread its works. The destructor aborts a lane that is not closed. A
/// forked child may neither use nor destroy it.
class Lane {
 public:
  Lane(LaneOptions options, std::shared_ptr<GroupComm> comm);
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  using Work = c10::intrusive_ptr<c10d::Work>;
  /// Sends to leader `peer`. Do not overwrite the tensors before the work is done; non-contiguous
  /// ones are copied. `label` names the message in errors. Throws LaneError for tensors that cannot
  /// be sent and on a failed lane.
  Work send(const std::vector<at::Tensor>& tensors, int peer, const std::string& label);
  /// Receives into `tensors` from leader `peer` and broadcasts them inside the stage, as one work.
  /// A member ignores `peer`.
  Work receive(const std::vector<at::Tensor>& tensors, int peer, const std::string& label);
  /// A fresh tensor from the lane's receive pool; see ReceivePool.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
    check_process();
    return pool_->empty(sizes, dtype);
  }
  /// The same for all tensors of one message.
  std::vector<at::Tensor> buffers(const std::vector<std::vector<int64_t>>& sizes,
                                  const std::vector<at::ScalarType>& dtypes) {
    check_process();
    return pool_->buffers(sizes, dtypes);
  }

  /// Waits up to `timeout` for messages in flight, then aborts the rest and stops. Idempotent.
  /// Throws LaneError for a negative timeout.
  virtual void close(std::chrono::milliseconds timeout) = 0;
  /// Fails everything pending and everything later with `reason`. Returns at once.
  virtual void abort(const std::string& reason) = 0;
  /// Describes a message that has been in flight for longer than the timeout; empty if there is
  /// none or if the backend times messages out itself.
  virtual std::string overdue() { return {}; }

  bool is_of_this_process() const { return process_.is_current(); }
  /// Throws LaneError in a process that was forked from the lane's.
  void check_process() const { process_.check(options_.name); }

  const LaneOptions& options() const { return options_; }
  const LaneStats& stats() const { return *stats_; }
  /// See Transport::bounced.
  virtual int64_t bounced() const { return 0; }
  int64_t pool_bytes() const { return pool_->bytes(); }

 protected:
  virtual Work launch_send(const std::vector<at::Tensor>& tensors, int peer,
                           const MessageName& name) = 0;
  virtual Work launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                              const MessageName& name) = 0;

  LaneOptions options_;
  std::shared_ptr<GroupComm> comm_;
  std::shared_ptr<LaneStats> stats_;
  std::shared_ptr<Failure> failure_;
  std::shared_ptr<ReceivePool> pool_;

 private:
  const OwnerProcess process_;

  std::string describe_message(const char* verb, int peer, const std::vector<at::Tensor>& tensors,
                               const std::string& label) const;
  std::string name_of(int peer) const;
  void check_peer(const MessageName& name, int peer) const;
  template <typename Launch>
  Work guarded(const MessageName& name, Launch launch);
};

}  // namespace ldt
