// The lane for CPU tensors: worker threads that start the broadcast when the receive has landed.
#pragma once

#include <thread>

#include <deque>

#include "lanes/host_message.h"

namespace ldt {

/// One thread, first in first out. Starts with its first message, so a direction that a lane never
/// uses costs nothing.
class MessageWorker {
 public:
  ~MessageWorker() { stop(); }
  void push(std::shared_ptr<HostMessage> message);
  /// Whether everything pushed was finished by the deadline.
  bool drain(std::chrono::steady_clock::time_point deadline);
  /// Ends the waits of everything pending; the lane's failure has been set.
  void abort();
  /// Finishes what is pending, then joins. Call abort() before, if that could take long. From the
  /// thread itself (a future's callback may drop the lane) it does not wait.
  void stop();

 private:
  /// The thread's own, so that it may outlive the worker that it has just dropped.
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

/// Sends and receives have a thread each: crossing messages of two ranks on one lane must not wait
/// for one another.
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
