// The sending end of an IPC link.
#pragma once

#include <optional>
#include <string>

#include "common/event.h"
#include "copy_engine/ipc_memory_table.h"

namespace ldt {

/// Sends messages of one tensor each, in the order of begin(). Enqueues on the stream that is
/// passed.
class IpcSender {
 public:
  /// `offer` is the IpcReceiver's. The other end may read sources in `memory`, if given, instead of
  /// having them copied. Throws LaneError that says why the other end's memory cannot be used.
  IpcSender(c10::Device device, const std::string& offer, std::shared_ptr<IpcPool> memory);

  struct Source {
    const char* address = nullptr;
    int64_t bytes = 0;
    int64_t piece_bytes = 0;  // of each push()
    bool may_offer = false;   // nothing writes to it before taken()
  };
  /// Starts the next message.
  void begin(const c10::Stream& stream, const Source& source, std::chrono::milliseconds timeout);
  /// Sends the next `bytes` of the message, which earlier work on `stream` has written.
  void push(const c10::Stream& stream, int64_t bytes);
  /// Done when all pushed bytes have been copied.
  std::shared_ptr<const Event> sent() const;
  /// Done when the other end has read all messages that it reads from here; null if there are none.
  std::shared_ptr<const Event> taken() const;

  /// An upper bound of the operations enqueued so far.
  int64_t enqueued() const { return enqueued_; }

  /// After a failure: blocks all waits of the other end, as the data that follows is invalid.
  void hold();
  /// Then: ends all waits of this end, for good.
  void release();

 private:
  void copy(const c10::Stream& stream, int64_t bytes);

  CopyEngine& engine_;
  std::shared_ptr<SharedRing> ring_;
  std::optional<ExportedMemory> exports_;
  ImportedMemory imports_;

  int64_t enqueued_ = 0;
  uint64_t number_ = 0;   // of the next message
  uint64_t arrived_ = 0;  // last count written to MessageRing::arrived
  uint64_t bounced_ = 0;  // bounce slots filled
  uint64_t offered_ = 0;  // messages that the other end reads

  // The current message.
  MessageRing::Protocol protocol_ = MessageRing::Protocol::kBounced;
  Source source_;
  int64_t piece_bytes_ = 0;
  char* target_ = nullptr;  // memory that the receiver posted
  int64_t done_ = 0;        // bytes sent
};

}  // namespace ldt
