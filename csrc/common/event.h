// The end of something that is enqueued on a device.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace ldt {

/// Streams can wait for it, and the host can ask. Any number of times, from any thread.
class End {
 public:
  virtual ~End() = default;
  virtual bool is_reached() const = 0;
  /// What is enqueued on `stream` after this happens after the end.
  virtual void block(const c10::Stream& stream) const = 0;
};

inline bool all_reached(const std::vector<std::shared_ptr<const End>>& ends) {
  return std::all_of(ends.begin(), ends.end(), [](const auto& end) { return end->is_reached(); });
}

/// The later one of two.
class BothEnds final : public End {
 public:
  BothEnds(std::shared_ptr<const End> one, std::shared_ptr<const End> other)
      : one_(std::move(one)), other_(std::move(other)) {}
  bool is_reached() const override { return one_->is_reached() && other_->is_reached(); }
  void block(const c10::Stream& stream) const override {
    one_->block(stream);
    other_->block(stream);
  }

 private:
  const std::shared_ptr<const End> one_;
  const std::shared_ptr<const End> other_;
};

}  // namespace ldt
