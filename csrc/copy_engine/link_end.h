// The ends of a link that moves messages by the copy engine: the interface that the transport is
// written against.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <memory>
#include <string>

#include "common/event.h"

namespace ldt {

/// Per piece at most a wait, a copy and a flag.
constexpr int64_t kOperationsOfPiece = 3;

/// What both ends have in common. Each takes messages of one tensor, in the order of begin(), and
/// enqueues on the stream that is passed.
class LinkEnd {
 public:
  virtual ~LinkEnd() = default;
  /// An upper bound of the operations enqueued so far.
  virtual int64_t enqueued() const = 0;
  /// Called when the device has done all that was enqueued: the host's part is done afterwards,
  /// too.
  virtual void flush() {}
  /// After a failure: blocks all waits of the other end, as the data that follows is invalid.
  virtual void hold() = 0;
  /// Then: ends all waits of this end, for good.
  virtual void release() = 0;
  /// Why nothing moves any more and what else would not be noticed; empty if it does.
  virtual std::string failure() const { return {}; }
};

class SendingEnd : public LinkEnd {
 public:
  struct Source {
    const char* address = nullptr;
    int64_t bytes = 0;
    int64_t piece_bytes = 0;  // of each push()
    bool may_offer = false;   // nothing writes to it before taken()
  };
  /// Starts the next message.
  virtual void begin(const c10::Stream& stream, const Source& source,
                     std::chrono::milliseconds timeout) = 0;
  /// Sends the next `bytes` of the message, which earlier work on `stream` has written.
  virtual void push(const c10::Stream& stream, int64_t bytes) = 0;
  /// Done when all pushed bytes have been copied; null: in stream order.
  virtual std::shared_ptr<const Event> sent() const = 0;
  /// Done when the other end has read all messages that it reads from here; null if there are none.
  virtual std::shared_ptr<const Event> taken() const { return nullptr; }
};

class ReceivingEnd : public LinkEnd {
 public:
  struct Target {
    char* address = nullptr;
    int64_t bytes = 0;
    bool may_post = false;  // nothing but work on `stream` precedes a write to it
    bool is_free = false;   // no enqueued work uses it
  };
  /// Starts the next message. await() can wait for each piece of `piece_bytes`.
  virtual void begin(const c10::Stream& stream, const Target& target, int64_t piece_bytes,
                     std::chrono::milliseconds timeout) = 0;
  /// Makes `stream` wait until the next `bytes` of the message are in the target.
  virtual void await(const c10::Stream& stream, int64_t bytes) = 0;
  /// Done when a message that is written to the target with nothing enqueued here is there whole;
  /// null for one that await() must be called for.
  virtual std::shared_ptr<const Event> arrival() const { return nullptr; }
  /// The number of messages that took an extra copy so far.
  virtual int64_t bounced() const { return 0; }
};

}  // namespace ldt
