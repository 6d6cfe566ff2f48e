// Waits on the host in slices, to notice interrupts.
#include "lanes/host_work.h"

#include <ATen/core/ivalue_inl.h>

#include "common/error.h"
#include "common/interrupt.h"
#include "common/timeout.h"

namespace ldt {
namespace {

constexpr std::chrono::milliseconds kInterruptPeriod{200};

void settle(c10::ivalue::Future& future, const std::exception_ptr& error) {
  if (error) {
    future.setErrorIfNeeded(error);
  } else {
    future.markCompleted(c10::IValue(std::vector<at::Tensor>{}));
  }
}

}  // namespace

HostWork::HostWork(c10d::OpType type, std::string name, std::shared_ptr<LaneStats> stats)
    : Work(-1, type), name_(std::move(name)), stats_(std::move(stats)) {}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  process_.check(name_);
  const auto deadline = timeout == kNoTimeout ? Clock::time_point::max()
                                              : Clock::now() + checked_timeout(timeout, name_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!completed_) {
    ScopedTimer timer(stats_->wait_nanoseconds);
    const auto slice = [&] { return std::min(deadline, Clock::now() + kInterruptPeriod); };
    while (!cv_.wait_until(lock, slice(), [this] { return completed_; })) {
      lock.unlock();
      check_interrupt();
      if (Clock::now() >= deadline) {
        throw_lane_error(name_, ": not done after the ", timeout.count(),
                         " ms that wait() was given; it goes on, wait again or abort the lane");
      }
      lock.lock();
    }
  }
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

void HostWork::abort() {
  throw_lane_error(name_, ": one message of a lane cannot be aborted alone; abort the lane");
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::getFuture() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) {
      settle(*future_, exception_);
    }
  }
  return future_;
}

void HostWork::complete(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (completed_) {
      return;
    }
    completed_ = true;
    exception_ = error;
    future = future_;
  }
  cv_.notify_all();
  if (future) {
    settle(*future, error);  // runs callbacks: not under the lock
  }
}

}  // namespace ldt
