// The course of a message: waits, aborts, error texts.
#include "lanes/host_message.h"

namespace ldt {
namespace {

// Without an abort in the backend, the lane's timeout ends the wait.
void abort_transfer(const GroupComm::Work& transfer) noexcept {
  try {
    transfer->abort();
  } catch (...) {
  }
}

}  // namespace

HostMessage::HostMessage(std::shared_ptr<const HostContext> context, c10d::OpType type,
                         MessageTensors tensors, int peer, std::string name)
    : context_(std::move(context)),
      tensors_(std::move(tensors)),
      peer_(peer),
      name_(std::move(name)),
      work_(c10::make_intrusive<HostWork>(type, name_, context_->stats)) {}

void HostMessage::finish() {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::exception_ptr error;
  try {
    context_->failure->throw_if_happened();
    run();
  } catch (...) {
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    context_->failure->set(failure_text(std::current_exception(), elapsed.count()));
    error = std::make_exception_ptr(
        LaneError({__func__, __FILE__, __LINE__}, context_->failure->text()));
  }
  {
    // Release everything before completing the work: a waiter may rely on the memory being free.
    std::lock_guard<std::mutex> lock(mutex_);
    started_.clear();
  }
  transfers_.clear();
  pieces_.clear();
  tensors_.release();
  work_->complete(error);
}

std::string HostMessage::failure_text(const std::exception_ptr& error, double seconds) const {
  const char* culprit = "";
  try {
    std::rethrow_exception(error);
  } catch (const StageError&) {
    culprit = ": the broadcast inside the stage";  // the named peer is innocent
  } catch (...) {
  }
  return c10::str(name_, " (", tensors_.bytes(), " bytes)", culprit, " failed after ", seconds,
                  " s: ", text_of(error));
}

void HostMessage::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& transfer : started_) {
    abort_transfer(transfer);
  }
  if (signal_) {
    std::lock_guard<std::mutex> signal_lock(signal_->mutex);
    signal_->aborted = true;
    signal_->changed.notify_all();
  }
}

GroupComm::Work HostMessage::started(GroupComm::Work transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  started_.push_back(transfer);
  if (context_->failure->happened()) {
    abort_transfer(transfer);  // an earlier abort() has missed it
  }
  return transfer;
}

void HostMessage::wait_for_transfer(const GroupComm::Work& transfer) {
  if (!transfer->wait(context_->options.timeout)) {
    context_->failure->throw_if_happened();
    throw_lane_error("the transfer was aborted");
  }
}

void HostMessage::wait_for_collective(const GroupComm::Work& collective) {
  auto signal = std::make_shared<Signal>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    signal->aborted = context_->failure->happened();
    signal_ = signal;
  }
  const auto future = collective->getFuture();
  future->addCallback([signal](c10::ivalue::Future&) {
    std::lock_guard<std::mutex> lock(signal->mutex);
    signal->done = true;
    signal->changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(signal->mutex);
  if (!signal->changed.wait_for(lock, context_->options.timeout,
                                [&] { return signal->done || signal->aborted; })) {
    throw StageError({__func__, __FILE__, __LINE__},
                     c10::str("it did not end within the lane's timeout of ",
                              context_->options.timeout.count(), " ms"));
  }
  if (!signal->done) {
    context_->failure->throw_if_happened();
  }
  if (future->hasError()) {
    in_stage([&] { std::rethrow_exception(future->exception_ptr()); });
  }
}

}  // namespace ldt
