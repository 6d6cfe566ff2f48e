// The end of something that is enqueued on a device.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace ldt {

/// Streams can wait for it, and the host can ask. Any number of times, from any thread.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool is_done() const = 0;
  /// What is enqueued on `stream` after this happens after the end.
  virtual void block(const c10::Stream& stream) const = 0;
};

inline bool all_done(const std::vector<std::shared_ptr<const Event>>& ends) {
  return std::all_of(ends.begin(), ends.end(), [](const auto& end) { return end->is_done(); });
}

/// The later one of two.
class BothEvents final : public Event {
 public:
  BothEvents(std::shared_ptr<const Event> one, std::shared_ptr<const Event> other)
      : one_(std::move(one)), other_(std::move(other)) {}
  bool is_done() const override { return one_->is_done() && other_->is_done(); }
  void block(const c10::Stream& stream) const override {
    one_->block(stream);
    other_->block(stream);
  }

 private:
  const std::shared_ptr<const Event> one_;
  const std::shared_ptr<const Event> other_;
};

}  // namespace ldt
