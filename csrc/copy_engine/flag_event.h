// Events that a device of another process signals by a flag.
#pragma once

#include <memory>

#include "common/event.h"
#include "copy_engine/shared_ring.h"

namespace ldt {

/// Done when the flag reaches `count`. Enqueues nothing until a stream waits for it, and nothing if
/// the host already sees the count: work enqueued after that sees it, too.
class FlagEvent : public Event {
 public:
  FlagEvent(CopyEngine& engine, std::shared_ptr<SharedRing> ring, const Flag& flag, uint64_t count)
      : engine_(engine), ring_(std::move(ring)), flag_(flag), count_(count) {}
  bool is_done() const override { return flag_.has_reached(count_); }
  void block(const c10::Stream& stream) const override {
    if (is_done()) return;
    ring_->note_user(stream);
    engine_.wait_for(stream, flag_, count_);
  }

 protected:
  CopyEngine& engine_;
  const std::shared_ptr<SharedRing> ring_;  // owns the flag
  const Flag& flag_;
  const uint64_t count_;
};

/// The same on the end whose own device writes the flag: no failure holds it up.
class LocalFlagEvent final : public FlagEvent {
 public:
  using FlagEvent::FlagEvent;
  bool is_done() const override { return flag_.has_counted(count_); }
  void block(const c10::Stream& stream) const override {
    if (is_done()) return;
    ring_->note_user(stream);
    engine_.wait_for_count(stream, flag_, count_);
  }
};

}  // namespace ldt
