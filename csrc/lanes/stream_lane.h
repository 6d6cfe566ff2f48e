// The lane for devices with streams: everything is enqueued at launch, in the order of one stream.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "copy_engine/copy_engine.h"
#include "lanes/agreement.h"
#include "lanes/lane.h"
#include "memory/message_tensors.h"
#include "transports/transport.h"

namespace ldt {

/// Written with c10's device-independent Stream, Event and virtual device guard only, so that CUDA
/// and torch_npu run the same code. A backend's own wait() orders the current stream, here the
/// lane's.
///
/// A launch begins with the lane's stream waiting for what the message needs, and ends with an
/// event after its last transfer. Between the two nothing waits on the host, unless messages are
/// announced (a debug mode: comparing needs the peer's word on the host). How the payload moves is
/// the transport's business. While a graph is captured, a launch throws LaneError.
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
  /// A message that the device may still be reading or writing.
  struct InFlight {
    std::shared_ptr<const Event> end;
    MessageTensors message;
    const char* verb;
    std::string label;
    std::chrono::steady_clock::time_point since;
    int64_t operations;  // that it took
  };

  Work launch_send(const std::vector<at::Tensor>& tensors, int peer,
                   const MessageName& name) override;
  Work launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                      const MessageName& name) override;

  // None of these throws, whatever the device answers: what is behind them must be done all the
  // same.
  void end_transfers() noexcept;
  void shutdown_transport() noexcept;
  template <typename Step>
  void attempt(const char* failed, const Step& step) noexcept;

  void wait_for_current_stream();
  void refuse_capture(const MessageName& name) const;
  /// Returns when the lane's stream has room for a message. Throws LaneError if that takes longer
  /// than the timeout.
  void wait_for_room(const MessageName& name);
  /// Of all messages that are not done.
  int64_t pending_operations();
  bool agree(const MessageTensors& message, int peer, const MessageName& name);
  void count_received(int64_t bytes, bool broadcasts);
  Announcement exchange_announcements(const Announcement& own, int peer, bool speak_first);
  StageAgreement stage_agreement();
  template <typename Step>
  auto run_or_abort(c10d::OpType type, MessageTensors& message, const MessageName& name,
                    const Step& step);
  Work finish(c10d::OpType type, std::shared_ptr<const Event> end, MessageTensors message,
              const std::string& label);
  /// Lets go of the messages that are done, without waiting. Runs at every launch. Whether none is
  /// left.
  bool retire();
  /// Waits until none is left; false if that takes longer, or if the device does not tell.
  bool drain(std::chrono::milliseconds timeout) noexcept;

  const std::unique_ptr<Transport> transport_;
  CopyEngine* const engine_;  // null: the device has none
  const c10::Stream stream_;
  const std::shared_ptr<EventPool> events_;
  std::mutex mutex_;
  std::deque<InFlight> in_flight_;
  std::atomic<int64_t> operations_{0};  // of all in there
  int64_t counted_ = 0;                 // of what the transport has enqueued
  std::atomic<bool> has_ended_transfers_{false};
};

}  // namespace ldt
