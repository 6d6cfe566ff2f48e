// One message of a host lane: what is posted at launch, and what the worker thread does in its
// turn.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "lanes/agreement.h"
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
/// the four steps below.
class HostMessage {
 public:
  HostMessage(std::shared_ptr<const HostContext> context, c10d::OpType type, MessageTensors tensors,
              int peer, std::string name);
  virtual ~HostMessage() = default;

  /// Throws what the backend throws for a call that it refuses.
  void post();
  /// Never throws: completes the work with the error instead. A backend's error fails the whole
  /// lane, a mismatch this message only.
  void finish();
  /// Ends a wait inside finish(), now or later. Callable from any thread. Set the lane's failure
  /// before.
  void abort();

  const c10::intrusive_ptr<HostWork>& work() const { return work_; }

 protected:
  /// With announcements, at launch: starts the exchange.
  virtual void announce() = 0;
  /// With announcements, in the worker's turn: throws MismatchError unless all ranks agree.
  virtual void agree() = 0;
  /// At launch or, with announcements, once all ranks agree.
  virtual void start_payload() = 0;
  virtual void finish_payload() = 0;

  GroupComm::Work started(GroupComm::Work transfer);
  /// Waits for a point-to-point transfer: exactly once, as gloo requires.
  void wait_for_transfer(const GroupComm::Work& transfer);
  /// Waits for a collective through its future, so that abort() can end the wait: gloo's
  /// collectives have no abort.
  void wait_for_collective(const GroupComm::Work& collective);

  /// Starts sending this end's announcement as `own` and receiving the peer's as `theirs`.
  void post_announcements(GroupComm::Tag own, GroupComm::Tag theirs);
  /// Waits for both and returns the peer's. Throws LaneError if it is unreadable.
  Announcement exchange_announcements();
  StageAgreement stage_agreement();
  Announcement announcement() const;

  std::shared_ptr<const HostContext> context_;
  MessageTensors tensors_;
  const int peer_;
  const std::string name_;
  std::vector<at::Tensor> pieces_;
  std::vector<GroupComm::Work> payload_;  // one for each piece

 private:
  void run();
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
  at::Tensor outgoing_, incoming_;        // announcements
  GroupComm::Work sent_announcement_, received_announcement_;
};

class SendMessage final : public HostMessage {
 public:
  using HostMessage::HostMessage;

 private:
  void announce() override;
  void agree() override;
  void start_payload() override;
  void finish_payload() override;
};

/// A receiving leader: receives piece by piece, and broadcasts one while it receives the next.
class ReceiveMessage final : public HostMessage {
 public:
  using HostMessage::HostMessage;

 private:
  void announce() override;
  void agree() override;
  void start_payload() override;
  void finish_payload() override;

  bool stage_agrees_ = true;
};

/// Another rank of the receiving stage: joins the broadcast only.
class MemberMessage final : public HostMessage {
 public:
  using HostMessage::HostMessage;

 private:
  // The leader asks first; the broadcasts of the agreement precede those of the payload.
  void announce() override {}
  void agree() override;
  void start_payload() override;
  void finish_payload() override;
};

}  // namespace ldt
