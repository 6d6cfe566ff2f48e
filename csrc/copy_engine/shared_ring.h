// A message ring in shared memory that the device can access, and the matching of messages in it.
#pragma once

#include <chrono>
#include <string>

#include "common/error.h"
#include "copy_engine/copy_engine.h"
#include "copy_engine/registered_pages.h"

namespace ldt {

/// A ring in this process's address space.
class SharedRing {
 public:
  /// Creates a ring.
  explicit SharedRing(c10::Device device);
  /// Opens the other end's ring.
  SharedRing(c10::Device device, const std::string& handle);

  MessageRing& operator*() const { return *ring_; }
  MessageRing* operator->() const { return ring_; }
  const std::string& handle() const { return pages_.handle(); }
  /// Notes that `stream` waits for a flag or writes one.
  void note_user(const c10::Stream& stream) { pages_.note_user(stream); }
  /// See RegisteredPages.
  std::function<bool()> enqueued_is_done() { return pages_.enqueued_is_done(); }

 private:
  RegisteredPages pages_;
  MessageRing* const ring_;
};

/// Matches message `number` (MessageRing::match), waiting while the other end is a whole ring
/// behind. Throws LaneError if that takes longer than `timeout` or if the two ends differ in size.
MessageRing::Outcome match_message(const SharedRing& ring, uint64_t number, MessageRing::Side side,
                                   const Proposal& mine, std::chrono::milliseconds timeout);

}  // namespace ldt
