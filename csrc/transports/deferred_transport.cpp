// A queue of calls and the thread that makes them.
#include "transports/deferred_transport.h"

#include <c10/core/StreamGuard.h>

#include <utility>

#include "common/error.h"
#include "common/event.h"

namespace ldt {
namespace {

// A call of 16 transfers, the maximum, takes about 64 of the 1024 operations that a queue holds.
constexpr size_t kMostCalls = 8;

}  // namespace

DeferredTransport::DeferredTransport(std::unique_ptr<Transport> transport, c10::Device device)
    : transport_(std::move(transport)),
      stream_(new_lane_stream(device)),
      events_(std::make_shared<EventPool>(device)),
      thread_([this] { work(); }) {}

DeferredTransport::~DeferredTransport() {
  if (!process_.is_current()) {
    thread_.detach();  // a forked child has no such thread
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<const Event> DeferredTransport::send(const c10::Stream& stream,
                                                     const MessageTensors& message, int peer) {
  return defer(stream, [this, message, peer] { transport_->send(stream_, message, peer); });
}

ReceiveEvents DeferredTransport::receive(const c10::Stream& stream, const MessageTensors& message,
                                         const std::vector<ReceivePool::Claim>& claims, int peer,
                                         bool broadcasts) {
  auto run = [this, message = MessageTensors(message), claims, peer, broadcasts]() mutable {
    transport_->receive(stream_, message, claims, peer, broadcasts);
    message.unstage();
  };
  return {defer(stream, std::move(run)), nullptr};
}

std::shared_ptr<const Event> DeferredTransport::defer(const c10::Stream& stream,
                                                      std::function<void()> run) {
  auto done = std::make_shared<DeferredEvent>();
  Call call{events_->record(stream), std::move(run), done};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      done->set(nullptr);
      return done;
    }
    calls_.push_back(std::move(call));
  }
  changed_.notify_all();
  return done;
}

void DeferredTransport::work() {
  for (Call call; take(call); call = {}) run(call);
}

bool DeferredTransport::take(Call& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return stopped_ || !calls_.empty(); });
  if (stopped_) return false;
  call = std::move(calls_.front());
  calls_.pop_front();
  return true;
}

void DeferredTransport::run(Call& call) {
  std::exception_ptr error;
  const auto attempt = [&error](const auto& step) {
    try {
      step();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  attempt([&] {
    const c10::StreamGuard guard(stream_);
    attempt([&] {
      wait_for_room();
      call.ready->block(stream_);
      call.run();
    });
    // Before the event: a block of the receive pool returns when its last owner drops it.
    call.run = nullptr;
    // Of a failed call, too: the device may still use its memory.
    call.end = events_->record(stream_);
    enqueued_.push_back(call.end);
  });
  if (error) return fail(std::move(call), error);
  call.done->set(std::move(call.end));
}

// A thread that enqueues into a full queue blocks in the driver, where no abort ends it.
void DeferredTransport::wait_for_room() {
  while (!enqueued_.empty()) {
    if (enqueued_.front()->is_done()) {
      enqueued_.pop_front();
      continue;
    }
    if (enqueued_.size() < kMostCalls) return;
    if (stopped_) throw_lane_error("the lane was aborted");
    std::this_thread::sleep_for(kPollInterval);
  }
}

void DeferredTransport::fail(Call call, const std::exception_ptr& error) {
  failure_.set(text_of(error));
  call.run = nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  if (aborted_) {
    call.done->set(std::move(call.end));
  } else {
    calls_.push_front(std::move(call));
  }
}

void DeferredTransport::abort() {
  std::deque<Call> dropped;  // freed after the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = aborted_ = true;
    for (const auto& call : calls_) call.done->set(call.end);
    dropped.swap(calls_);
  }
  changed_.notify_all();
  transport_->abort();  // ends the running call
}

}  // namespace ldt
