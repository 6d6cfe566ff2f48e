// The receiving end of a route.
#pragma once

#include <string>

#include "common/event.h"
#include "copy_engine/ipc_memory_table.h"

namespace ldt {

/// Messages, each of one tensor, come in the order of begin(). What has to be enqueued is on the
/// stream that is given.
class IpcReceiver {
 public:
  /// The bounce slots are of `memory`, and so are targets that the sender may write to. Throws
  /// LaneError if this device cannot.
  explicit IpcReceiver(std::shared_ptr<IpcPool> memory);

  /// For the IpcSender of the other end: text of one line.
  std::string offer() const;

  struct Target {
    char* address = nullptr;
    int64_t bytes = 0;
    bool may_post = false;  // only `stream` is ahead of who may write to it, now
    bool is_free = false;   // not even that is: nothing that is enqueued uses it
  };
  /// The next message. Pieces of `grain` bytes can be awaited one by one.
  void begin(const c10::Stream& stream, const Target& target, int64_t grain,
             std::chrono::milliseconds timeout);
  /// What is enqueued on `stream` after this finds the next `bytes` of the message in its target.
  void await(const c10::Stream& stream, int64_t bytes);
  /// Whether the whole message comes into its target with nothing enqueued here, until end().
  bool comes_by_itself() const { return protocol_ == MessageRing::Protocol::kPosted; }
  /// How many messages so far came through the bounce slots.
  int64_t bounced() const { return bounced_.load(); }
  /// When it is there.
  std::shared_ptr<const Event> end() const;

  /// How many operations it has enqueued so far, or a few more.
  int64_t enqueued() const { return enqueued_; }

  /// After a failure: no wait of the other end ends any more, as what comes now is not to be used.
  void hold();
  /// And all waits of this end end, for good.
  void release();

 private:
  void await_posted(const c10::Stream& stream, int64_t wanted);
  void take_offered(const c10::Stream& stream, int64_t wanted);
  void await_bounced(const c10::Stream& stream, int64_t wanted);

  CopyEngine& engine_;
  std::shared_ptr<SharedRing> ring_;
  ExportedMemory exports_;
  ImportedMemory imports_;
  at::Tensor bounce_;  // the slots

  std::atomic<int64_t> bounced_{0};
  int64_t enqueued_ = 0;
  uint64_t number_ = 0;   // of the next message
  uint64_t arrived_ = 0;  // counts of MessageRing::arrived up to the end of this message
  uint64_t freed_ = 0;
  uint64_t readied_ = 0;
  uint64_t taken_ = 0;

  // The message that has begun.
  MessageRing::Protocol protocol_ = MessageRing::Protocol::kBounced;
  Target target_;
  Proposal decided_;
  int64_t asked_ = 0;            // bytes that were awaited
  int64_t done_ = 0;             // bytes that are in place
  uint64_t arrived_before_ = 0;  // arrived_ when it began
};

}  // namespace ldt
