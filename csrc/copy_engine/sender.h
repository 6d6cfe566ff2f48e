// The sending end of a route.
#pragma once

#include <optional>
#include <string>

#include "common/event.h"
#include "copy_engine/ipc_memory_table.h"

namespace ldt {

/// Messages, each of one tensor, go in the order of begin(). What has to be enqueued is on the
/// stream that is given.
class IpcSender {
 public:
  /// `offer` is that of the IpcReceiver. Sources in `memory`, if there is one, need not be copied
  /// to the other end: it may read them. Throws LaneError, saying why, if the other end's memory
  /// cannot be used.
  IpcSender(c10::Device device, const std::string& offer, std::shared_ptr<IpcPool> memory);

  struct Source {
    const char* address = nullptr;
    int64_t bytes = 0;
    int64_t grain = 0;       // pieces in which push() will be called
    bool may_offer = false;  // until taken(), nothing writes to it that does not wait for that
  };
  /// The next message.
  void begin(const c10::Stream& stream, const Source& source, std::chrono::milliseconds timeout);
  /// The next `bytes` of the message are there for what is on `stream` now, and may go.
  void push(const c10::Stream& stream, int64_t bytes);
  /// When all that was pushed so far has been copied.
  std::shared_ptr<const Event> sent() const;
  /// When the other end has read all messages so far that it reads from here. Null: there was none.
  std::shared_ptr<const Event> taken() const;

  /// How many operations it has enqueued so far, or a few more.
  int64_t enqueued() const { return enqueued_; }

  /// After a failure: no wait of the other end ends any more, as what comes now is not to be used.
  void hold();
  /// And all waits of this end end, for good.
  void release();

 private:
  void copy(const c10::Stream& stream, int64_t bytes);

  CopyEngine& engine_;
  std::shared_ptr<SharedRing> ring_;
  std::optional<ExportedMemory> exports_;
  ImportedMemory imports_;

  int64_t enqueued_ = 0;
  uint64_t number_ = 0;   // of the next message
  uint64_t arrived_ = 0;  // what MessageRing::arrived was set to
  uint64_t bounced_ = 0;  // slots that were filled
  uint64_t offered_ = 0;  // messages that the other end reads

  // The message that has begun.
  MessageRing::Protocol protocol_ = MessageRing::Protocol::kBounced;
  Source source_;
  int64_t grain_ = 0;
  char* target_ = nullptr;  // where it was posted
  int64_t done_ = 0;        // bytes that are sent
};

}  // namespace ldt
