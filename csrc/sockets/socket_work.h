// A c10d::Work for one message of a socket link.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <utility>

namespace ldt {

/// Completed by the link's thread. abort() fails the whole link: half a message cannot be taken
/// back.
class SocketWork final : public c10d::Work {
 public:
  using Done = std::function<void(const std::exception_ptr& error)>;

  /// `done`, if there is one, is called once, on a thread that completes the work.
  SocketWork(c10d::OpType type, std::function<void()> abort, Done done)
      : Work(-1, type), abort_(std::move(abort)), done_(std::move(done)) {}

  /// Throws LaneError when the timeout expires, and the link's error.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  void abort() override { abort_(); }
  /// May be called again, and on two threads at once, as when a link fails while a frame is
  /// written.
  void complete(const std::exception_ptr& error) {
    finish(error);
    if (const auto done = take_done()) done(error);
  }

 private:
  Done take_done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(done_, nullptr);
  }

  const std::function<void()> abort_;
  Done done_;
};

}  // namespace ldt
