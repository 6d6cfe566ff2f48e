// The sending end of an IPC link.
#pragma once

#include <optional>
#include <string>

#include "copy_engine/ipc_memory_table.h"
#include "copy_engine/link_end.h"

namespace ldt {

class IpcSender final : public SendingEnd {
 public:
  /// `offer` is the IpcReceiver's. The other end may read sources in `memory`, if given, instead of
  /// having them copied. Throws LaneError that says why the other end's memory cannot be used.
  IpcSender(c10::Device device, const std::string& offer, std::shared_ptr<IpcPool> memory);

  void begin(const c10::Stream& stream, const Source& source,
             std::chrono::milliseconds timeout) override;
  void push(const c10::Stream& stream, int64_t bytes) override;
  std::shared_ptr<const Event> sent() const override;
  std::shared_ptr<const Event> taken() const override;
  int64_t enqueued() const override { return enqueued_; }
  void hold() override;
  void release() override;

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
