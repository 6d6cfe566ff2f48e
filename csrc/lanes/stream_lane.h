// The lane for devices with streams: a launch enqueues everything in the order of one stream.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "copy_engine/copy_engine.h"
#include "lanes/lane.h"
#include "memory/message_tensors.h"
#include "transports/transport.h"

namespace ldt {

/// Uses c10's device-independent Stream, Event and device guard only, so that CUDA and torch_npu
/// run the same code. A backend's wait() orders the current stream, which is the lane's here.
///
/// A launch first makes the lane's stream wait for what the message needs, and last records an
/// event behind its transfers. The host does not wait in between. A transport moves the payload. A
/// launch during a graph capture throws LaneError.
class StreamLane final : public Lane {
 public:
  StreamLane(LaneOptions options, std::shared_ptr<GroupComm> comm,
             std::unique_ptr<Transport> transport);
  ~StreamLane() override;

  void close(std::chrono::milliseconds timeout) override;
  void abort(const std::string& reason) override;
  std::string overdue() override;
  int64_t bounced() const override { return transport_->bounced(); }

 private:
  /// A message that the device may still read or write.
  struct InFlight {
    std::shared_ptr<const Event> done;
    MessageTensors tensors;
    const char* verb;
    std::string label;
    std::chrono::steady_clock::time_point since;
    int64_t operations;  // that it enqueued
  };

  Work launch_send(const std::vector<at::Tensor>& tensors, int peer,
                   const MessageName& name) override;
  Work launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                      const MessageName& name) override;

  // These never throw, whatever the device answers, so that teardown continues.
  void end_transfers() noexcept;
  void shutdown_transport() noexcept;
  template <typename Step>
  void attempt(const char* failed, const Step& step) noexcept;

  void wait_for_current_stream();
  void refuse_capture(const MessageName& name) const;
  /// Waits until the lane's stream has room for a message. Throws LaneError after the timeout.
  void wait_for_room(const MessageName& name);
  /// The operations of all messages that are not done.
  int64_t pending_operations();
  void count_received(int64_t bytes, bool broadcasts);
  template <typename Step>
  auto run_or_abort(c10d::OpType type, MessageTensors& message, const MessageName& name,
                    const Step& step);
  Work finish(c10d::OpType type, std::shared_ptr<const Event> done, MessageTensors tensors,
              const std::string& label);
  /// Releases the messages that are done, without waiting. Runs at every launch. Returns whether
  /// none is left.
  bool retire();
  /// Waits until none is left. False after the timeout or if the device has failed.
  bool drain(std::chrono::milliseconds timeout) noexcept;

  const std::unique_ptr<Transport> transport_;
  CopyEngine* const engine_;  // null where the device has none
  const c10::Stream stream_;
  const std::shared_ptr<EventPool> events_;
  std::mutex mutex_;
  std::deque<InFlight> in_flight_;
  std::atomic<int64_t> operations_{0};  // of all messages in flight
  int64_t counted_ = 0;                 // of the transport's operations
  std::atomic<bool> has_ended_transfers_{false};
};

}  // namespace ldt
