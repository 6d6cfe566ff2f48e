// Events of work that a thread of the host has yet to enqueue.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "common/event.h"

namespace ldt {

/// Stands for an event that is recorded later. block() waits on the host until it is.
class DeferredEvent final : public Event {
 public:
  bool is_done() const override;
  /// May throw what the interrupt check throws.
  void block(const c10::Stream& stream) const override;
  bool is_recorded() const override;
  /// Call once. Null: nothing is left to wait for.
  void set(std::shared_ptr<const Event> event);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool recorded_ = false;
  std::shared_ptr<const Event> event_;  // not changed once recorded
};

}  // namespace ldt
