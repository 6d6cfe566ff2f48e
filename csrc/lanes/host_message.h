// One message of a host lane: what is posted at launch, and what the worker thread does in its
// turn.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "common/error.h"
#include "lanes/host_work.h"
#include "lanes/lane.h"
#include "memory/message_tensors.h"

namespace ldt {

/// What all messages of a host lane share.
struct HostContext {
  LaneOptions options;
  std::shared_ptr<GroupComm> comm;
  std::shared_ptr<LaneStats> stats;
  std::shared_ptr<Failure> failure;
};

/// post() runs in the caller's thread and starts all that can be started. finish() runs in the
/// worker's, in FIFO order, and completes it. A sender, a receiving leader and a member differ in
/// post() and run().
class HostMessage {
 public:
  HostMessage(std::shared_ptr<const HostContext> context, c10d::OpType type, MessageTensors tensors,
              int peer, std::string name);
  virtual ~HostMessage() = default;

  /// Throws what the backend throws for a call that it refuses.
  virtual void post() = 0;
  /// Never throws: completes the work with the error instead, which fails the whole lane.
  void finish();
  /// Ends a wait inside finish(), now or later. Callable from any thread. Set the lane's failure
  /// before.
  void abort();

  const c10::intrusive_ptr<HostWork>& work() const { return work_; }

 protected:
  /// In the worker's turn: waits for what post() has started.
  virtual void run() = 0;

  GroupComm::Work started(GroupComm::Work transfer);
  /// Waits for a point-to-point transfer: exactly once, as gloo requires.
  void wait_for_transfer(const GroupComm::Work& transfer);
  /// Waits for a collective through its future, so that abort() can end the wait: gloo's
  /// collectives have no abort.
  void wait_for_collective(const GroupComm::Work& collective);

  std::shared_ptr<const HostContext> context_;
  MessageTensors tensors_;
  const int peer_;
  const std::string name_;
  std::vector<at::Tensor> pieces_;
  std::vector<GroupComm::Work> transfers_;  // one for each piece

 private:
  std::string failure_text(const std::exception_ptr& error, double seconds) const;

  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    bool aborted = false;
  };

  c10::intrusive_ptr<HostWork> work_;
  std::mutex mutex_;
  std::vector<GroupComm::Work> started_;  // point-to-point transfers to abort
  std::shared_ptr<Signal> signal_;        // of the collective being waited for
};

class SendMessage final : public HostMessage {
 public:
  using HostMessage::HostMessage;
  void post() override;

 private:
  void run() override;
};

/// A receiving leader: receives piece by piece, and broadcasts one while it receives the next.
class ReceiveMessage final : public HostMessage {
 public:
  using HostMessage::HostMessage;
  void post() override;

 private:
  void run() override;
};

/// Another rank of the receiving stage: joins the broadcast only.
class MemberMessage final : public HostMessage {
 public:
  using HostMessage::HostMessage;
  void post() override;

 private:
  void run() override;
};

}  // namespace ldt
