// Enqueues messages on the lane's stream.
#include "lanes/stream_lane.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "common/interrupt.h"
#include "common/streams.h"
#include "common/timeout.h"
#include "copy_engine/copy_engine.h"
#include "lanes/stream_work.h"

namespace ldt {
namespace {

constexpr std::chrono::milliseconds kAbortTimeout{2000};

// A CUDA queue holds about 1024 operations; a message of 16 transfers, the maximum, takes about 64.
constexpr int64_t kMaxPendingOperations = 896;
// Per message, in addition to the transport's: events, and for a receive those of its memory.
constexpr int64_t kOperationsOfSend = 2;
constexpr int64_t kOperationsOfReceive = 5;

}  // namespace

StreamLane::StreamLane(LaneOptions options, std::shared_ptr<GroupComm> comm,
                       std::unique_ptr<Transport> transport)
    : Lane(std::move(options), std::move(comm)),
      transport_(std::move(transport)),
      engine_(find_copy_engine(options_.device.type())),
      stream_(transport_->stream(options_.device)),
      events_(std::make_shared<EventPool>(options_.device)) {
  pool_ = std::make_shared<ReceivePool>(options_.device, stream_, transport_->allocator());
}

StreamLane::~StreamLane() {
  try {
    close(std::chrono::milliseconds(0));
  } catch (const std::exception& error) {  // the device is gone, as at interpreter exit
    TORCH_WARN("lane ", options_.name, ": ", error.what());
  }
}

void StreamLane::wait_for_current_stream() {
  events_->record(current_stream(options_.device))->block(stream_);
}

// Captured work runs at every replay of the graph, but a lane counts messages at launch and queries
// its events.
void StreamLane::refuse_capture(const MessageName& name) const {
  if (!engine_ || !engine_->is_capturing(current_stream(options_.device))) return;
  throw_lane_error(
      name,
      ": the current stream is being captured into a graph, and messages of a lane cannot "
      "be: capture what computes, and send and receive outside of the graph");
}

// A message that the transport refuses may be half in flight, so that the two ends are
// desynchronized for good: this fails the lane. Keeps the tensors while the device may use them.
template <typename Step>
auto StreamLane::run_or_abort(c10d::OpType type, MessageTensors& message, const MessageName& name,
                              const Step& step) {
  try {
    return step();
  } catch (const StageError&) {
    throw;
  } catch (const LaneError& error) {
    const auto text = c10::str(name, ": ", error.what_without_backtrace());
    finish(type, events_->record(stream_), std::move(message), name.label());
    abort(text);
    throw_lane_error(text);
  }
}

Lane::Work StreamLane::launch_send(const std::vector<at::Tensor>& tensors, int peer,
                                   const MessageName& name) {
  refuse_capture(name);
  retire();
  // Copies, if any, are made on the current stream.
  wait_for_room(name);
  auto message = MessageTensors::for_send(tensors, options_.device, name);
  wait_for_current_stream();
  const c10::StreamGuard on_lane(stream_);
  auto done = run_or_abort(c10d::OpType::SEND, message, name,
                           [&] { return transport_->send(stream_, message, peer); });
  if (!done) done = events_->record(stream_);
  stats_->sent_bytes += message.bytes();
  stats_->sent_messages += 1;
  return finish(c10d::OpType::SEND, std::move(done), std::move(message), name.label());
}

Lane::Work StreamLane::launch_receive(const std::vector<at::Tensor>& tensors, int peer,
                                      const MessageName& name) {
  refuse_capture(name);
  retire();
  wait_for_room(name);
  const auto claims = pool_->claim(tensors);
  const bool pooled =
      std::find(claims.begin(), claims.end(), ReceivePool::Claim::kForeign) == claims.end();
  // Work enqueued on the current stream may still read a tensor of the caller's.
  if (!pooled) wait_for_current_stream();
  const c10::StreamGuard on_lane(stream_);
  auto message = MessageTensors::for_receive(tensors, options_.device, name, pool_->block_finder());
  const bool broadcasts = comm_->has_stage();
  const auto events = run_or_abort(c10d::OpType::RECV, message, name, [&] {
    return transport_->receive(stream_, message, claims, peer, broadcasts);
  });
  if (!events.received) message.unstage();
  count_received(message.bytes(), broadcasts);
  // A pooled block is not written to again before this message ends, so nothing has to keep it
  // alive until then: a host that runs far ahead needs no extra memory.
  if (pooled) message.release_tensors();
  const auto received = events.received ? events.received : events_->record(stream_);
  for (const auto& tensor : tensors) pool_->note_events(tensor, received, events.read);
  // After its wait() a caller may write to the tensors, so all reads must be over.
  auto done = events.read ? std::make_shared<BothEvents>(received, events.read) : received;
  return finish(c10d::OpType::RECV, std::move(done), std::move(message), name.label());
}

// A host that enqueues into a full queue blocks in the driver, where no failure ends it. So it
// waits here instead, until the other end makes progress.
void StreamLane::wait_for_room(const MessageName& name) {
  if (operations_ <= kMaxPendingOperations) return;
  const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
  while (pending_operations() > kMaxPendingOperations) {
    failure_->throw_if_happened();
    check_interrupt();
    if (std::chrono::steady_clock::now() >= deadline) {
      throw_lane_error(
          name, ": earlier messages of this lane have more than ", kMaxPendingOperations,
          " operations in the queue of the device, which holds few more, and that for ",
          options_.timeout.count(), " ms: does the rank at the other end still take part?");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

int64_t StreamLane::pending_operations() {
  retire();
  int64_t pending = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& message : in_flight_) {
    if (!message.done->is_done()) pending += message.operations;
  }
  return pending;
}

void StreamLane::count_received(int64_t bytes, bool broadcasts) {
  if (comm_->is_leader()) {
    stats_->received_bytes += bytes;
    stats_->received_messages += 1;
  }
  if (broadcasts) stats_->broadcast_bytes += bytes;
}

Lane::Work StreamLane::finish(c10d::OpType type, std::shared_ptr<const Event> done,
                              MessageTensors tensors, const std::string& label) {
  auto work = c10::make_intrusive<StreamWork>(type, options_.device, done, failure_, stats_);
  const char* verb = type == c10d::OpType::SEND ? "send" : "receive";
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto enqueued = transport_->enqueued();
    const auto own = type == c10d::OpType::SEND ? kOperationsOfSend : kOperationsOfReceive;
    const auto operations = enqueued - std::exchange(counted_, enqueued) + own;
    in_flight_.push_back({std::move(done), std::move(tensors), verb, label,
                          std::chrono::steady_clock::now(), operations});
    operations_ += operations;
  }
  if (failure_->happened()) end_transfers();  // abort() came before this message was in flight
  return work;
}

bool StreamLane::retire() {
  std::deque<InFlight> retired;  // freed after the lock: a tensor's deleter may call the lane
  std::lock_guard<std::mutex> lock(mutex_);
  while (!in_flight_.empty() && in_flight_.front().done->is_done()) {
    operations_ -= in_flight_.front().operations;
    retired.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
  return in_flight_.empty();
}

bool StreamLane::drain(std::chrono::milliseconds timeout) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  try {
    while (!retire()) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  } catch (...) {  // a failed device answers with an error, and nothing ends there any more
    return false;
  }
}

// Retires nothing: that would free memory on this thread's current stream.
std::string StreamLane::overdue() {
  if (const auto failure = transport_->failure(); !failure.empty()) {
    return c10::str("lane ", options_.name, ": ", failure);
  }
  if (transport_->has_own_timeout()) return {};
  const auto now = std::chrono::steady_clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto late =
      std::find_if(in_flight_.begin(), in_flight_.end(), [&](const InFlight& message) {
        return now - message.since >= options_.timeout && !message.done->is_done();
      });
  if (late == in_flight_.end()) return {};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - late->since).count();
  return c10::str("lane ", options_.name, ": ", late->verb, " ", late->label,
                  " has been under way for ", seconds, " s, longer than the timeout of ",
                  options_.timeout.count() / 1000.0, " s");
}

template <typename Step>
void StreamLane::attempt(const char* failed, const Step& step) noexcept {
  try {
    step();
  } catch (...) {
    TORCH_WARN("lane ", options_.name, " ", failed, ": ", text_of(std::current_exception()));
  }
}

void StreamLane::abort(const std::string& reason) {
  failure_->set(reason);
  shutdown_transport();
  if (!drain(std::chrono::milliseconds(0))) end_transfers();
}

// Only the backend can end a transfer whose peer is gone.
void StreamLane::end_transfers() noexcept {
  if (has_ended_transfers_.exchange(true)) return;
  attempt("could not end its transfers", [&] { transport_->abort(); });
}

// Call before the communicators are aborted or destroyed.
void StreamLane::shutdown_transport() noexcept {
  attempt("could not wait for a running call", [&] { transport_->shutdown(); });
}

void StreamLane::close(std::chrono::milliseconds timeout) {
  bool is_idle = drain(checked_timeout(timeout, c10::str("lane ", options_.name)));
  if (!is_idle) {
    abort(c10::str("lane ", options_.name, ": closed with messages still in flight"));
    is_idle = drain(kAbortTimeout);
    if (!is_idle) {
      // The device may still use these tensors, and nothing tells when not: leak them.
      std::lock_guard<std::mutex> lock(mutex_);
      new std::deque<InFlight>(std::move(in_flight_));
      in_flight_.clear();
    }
  }
  failure_->set(c10::str("lane ", options_.name, ": is closed"));
  shutdown_transport();
  if (is_idle) transport_->release();
}

}  // namespace ldt
