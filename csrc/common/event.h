// A point in the work of a device that streams and the host can wait for.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

namespace ldt {

/// How long a thread sleeps between two looks at what a device has done.
inline constexpr std::chrono::microseconds kPollInterval{50};

/// Like c10::Event, but read-only: waited for and queried any number of times, from any thread.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool is_done() const = 0;
  /// Makes everything enqueued on `stream` from now on wait for the event.
  virtual void block(const c10::Stream& stream) const = 0;
  /// Whether all that precedes the event has been enqueued. If not, block() waits for that on the
  /// host.
  virtual bool is_recorded() const { return true; }
};

inline bool all_done(const std::vector<std::shared_ptr<const Event>>& events) {
  return std::all_of(events.begin(), events.end(),
                     [](const auto& event) { return event->is_done(); });
}

/// Done when both are.
class BothEvents final : public Event {
 public:
  BothEvents(std::shared_ptr<const Event> one, std::shared_ptr<const Event> other)
      : one_(std::move(one)), other_(std::move(other)) {}
  bool is_done() const override { return one_->is_done() && other_->is_done(); }
  void block(const c10::Stream& stream) const override {
    one_->block(stream);
    other_->block(stream);
  }
  bool is_recorded() const override { return one_->is_recorded() && other_->is_recorded(); }

 private:
  const std::shared_ptr<const Event> one_;
  const std::shared_ptr<const Event> other_;
};

}  // namespace ldt
