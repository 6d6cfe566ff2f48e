// The receiving end of an IPC link.
#pragma once

#include <string>

#include "common/event.h"
#include "copy_engine/ipc_memory_table.h"

namespace ldt {

/// Receives messages of one tensor each, in the order of begin(). Enqueues on the stream that is
/// passed.
class IpcReceiver {
 public:
  /// `memory` provides the bounce slots and the targets that the sender may write to. Throws
  /// LaneError if the device has no usable copy engine.
  explicit IpcReceiver(std::shared_ptr<IpcPool> memory);

  /// What the IpcSender of the other process connects to, in one line.
  std::string offer() const;

  struct Target {
    char* address = nullptr;
    int64_t bytes = 0;
    bool may_post = false;  // nothing but work on `stream` precedes a write to it
    bool is_free = false;   // no enqueued work uses it
  };
  /// Starts the next message. await() can wait for each piece of `piece_bytes`.
  void begin(const c10::Stream& stream, const Target& target, int64_t piece_bytes,
             std::chrono::milliseconds timeout);
  /// Makes `stream` wait until the next `bytes` of the message are in the target.
  void await(const c10::Stream& stream, int64_t bytes);
  /// Whether the sender writes the whole message to the target, with nothing enqueued here.
  bool is_one_sided() const { return protocol_ == MessageRing::Protocol::kPosted; }
  /// The number of messages that took the bounce slots so far.
  int64_t bounced() const { return bounced_.load(); }
  /// Done when the whole message is in the target.
  std::shared_ptr<const Event> arrived() const;

  /// An upper bound of the operations enqueued so far.
  int64_t enqueued() const { return enqueued_; }

  /// After a failure: blocks all waits of the other end, as the data that follows is invalid.
  void hold();
  /// Then: ends all waits of this end, for good.
  void release();

 private:
  void await_posted(const c10::Stream& stream, int64_t wanted);
  void copy_offered(const c10::Stream& stream, int64_t wanted);
  void await_bounced(const c10::Stream& stream, int64_t wanted);

  CopyEngine& engine_;
  std::shared_ptr<SharedRing> ring_;
  ExportedMemory exports_;
  ImportedMemory imports_;
  at::Tensor bounce_;  // the bounce slots

  std::atomic<int64_t> bounced_{0};
  int64_t enqueued_ = 0;
  uint64_t number_ = 0;   // of the next message
  uint64_t arrived_ = 0;  // MessageRing::arrived at the end of this message
  uint64_t freed_ = 0;
  uint64_t readied_ = 0;
  uint64_t taken_ = 0;

  // The current message.
  MessageRing::Protocol protocol_ = MessageRing::Protocol::kBounced;
  Target target_;
  Proposal decided_;
  int64_t asked_ = 0;            // bytes awaited so far
  int64_t done_ = 0;             // bytes in the target
  uint64_t arrived_before_ = 0;  // arrived_ when the message began
};

}  // namespace ldt
