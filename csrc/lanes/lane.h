// A lane: what carries channels between two nodes. The contract is section 5 of docs/design.md.
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
#include "transports/transport.h"

namespace ldt {

struct LaneOptions {
  std::string name;               // in every error text, e.g. "F0:0.0->1.0"
  c10::Device device = at::kCPU;  // where the tensors of its messages live
  int64_t chunk_bytes = 0;        // the broadcast of one piece runs while the next is received
  // How long one message may take once it is its turn. Where nothing else ends it, overdue() tells.
  std::chrono::milliseconds timeout{};
  bool announce = false;  // check size, dtype and shape with the other side before each payload
  std::vector<int> global_ranks;  // what texts call the peers, by peer; empty: their group ranks
};

/// Carries messages, first in first out. A message is a list of tensors; both sides know its
/// shapes.
///
/// send and receive issue everything and return at once; the work they return only waits. A lane is
/// used by one thread at a time, its works by any. Unless closed, the destructor aborts. A forked
/// child may neither use nor destroy it.
class Lane {
 public:
  Lane(LaneOptions options, std::shared_ptr<GroupComm> comm);
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  using Work = c10::intrusive_ptr<c10d::Work>;
  /// Sends to leader `peer`. The tensors may be overwritten only after the work is done;
  /// non-contiguous ones are copied. `label` names the message in errors. Throws LaneError on bad
  /// tensors or a failed lane.
  Work send(const std::vector<at::Tensor>& tensors, int peer, const std::string& label);
  /// Receives from leader `peer`, then broadcasts inside the stage; a member ignores `peer`. The
  /// broadcast and the receive are one work. Writes into `tensors`.
  Work receive(const std::vector<at::Tensor>& tensors, int peer, const std::string& label);
  /// A fresh tensor over memory of the lane's receive pool; see ReceivePool.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
    check_process();
    return pool_->empty(sizes, dtype);
  }
  /// For all tensors of one message: see ReceivePool.
  std::vector<at::Tensor> buffers(const std::vector<std::vector<int64_t>>& sizes,
                                  const std::vector<at::ScalarType>& dtypes) {
    check_process();
    return pool_->buffers(sizes, dtypes);
  }

  /// Waits for what is in flight, at most `timeout`, then aborts what is left and stops.
  /// Idempotent. Throws LaneError for a negative timeout.
  virtual void close(std::chrono::milliseconds timeout) = 0;
  /// Everything pending and everything later fails with `reason`. Returns at once.
  virtual void abort(const std::string& reason) = 0;
  /// What has been under way for longer than the timeout, in words; empty if nothing has, and where
  /// something else looks after that.
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

/// A host lane on CPU, a stream lane on any device that has streams (CUDA, NPU). Payload of a
/// stream lane goes by `transport`, without one by `transport`, which is then what compares
/// announcements only. Throws LaneError for options that make no sense.
std::shared_ptr<Lane> make_lane(LaneOptions options, std::shared_ptr<GroupComm> comm,
                                std::unique_ptr<Transport> transport = nullptr);

}  // namespace ldt
