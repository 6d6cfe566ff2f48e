// The lane for CPU tensors: worker threads start the broadcast once the receive has completed.
#pragma once

#include <thread>

#include <deque>

#include "lanes/host_message.h"

namespace ldt {

/// A thread that finishes messages first in, first out. It starts with the first message, so an
/// unused direction of a lane costs nothing.
class MessageWorker {
 public:
  ~MessageWorker() { stop(); }
  void push(std::shared_ptr<HostMessage> message);
  /// Waits until the deadline; returns whether everything pushed is finished.
  bool drain(std::chrono::steady_clock::time_point deadline);
  /// Ends the waits of everything pending. Set the lane's failure before.
  void abort();
  /// Finishes what is pending, then joins. Call abort() first if that could take long. Does not
  /// wait when called from the thread itself, as a future's callback that drops the lane does.
  void stop();

 private:
  /// Shared with the thread, which may outlive the worker.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<HostMessage>> pending;  // the front one is being finished
    bool stopping = false;
  };

  static void run(const std::shared_ptr<Queue>& queue);

  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::mutex joining_;
  std::thread thread_;
};

/// Has one thread for sends and one for receives, so that crossing messages of two ranks on one
/// lane do not wait for each other.
class HostLane final : public Lane {
 public:
  HostLane(LaneOptions options, std::shared_ptr<GroupComm> comm);
  ~HostLane() override;

  void close(std::chrono::milliseconds timeout) override;
  void abort(const std::string& reason) override;

 private:
  Work launch_send(const std::vector<at::Tensor>& tensors, int peer,
                   const MessageName& name) override;
  Work launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                      const MessageName& name) override;
  Work launch(MessageWorker& worker, std::shared_ptr<HostMessage> message);

  std::shared_ptr<const HostContext> context_;
  MessageWorker outgoing_;
  MessageWorker incoming_;
};

}  // namespace ldt
