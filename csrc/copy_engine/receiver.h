// The receiving end of an IPC link.
#pragma once

#include <string>

#include "copy_engine/ipc_memory_table.h"
#include "copy_engine/link_end.h"

namespace ldt {

class IpcReceiver final : public ReceivingEnd {
 public:
  /// `memory` provides the bounce slots and the targets that the sender may write to. Throws
  /// LaneError if the device has no usable copy engine.
  explicit IpcReceiver(std::shared_ptr<IpcPool> memory);

  /// What the IpcSender of the other process connects to, in one line.
  std::string offer() const;

  void begin(const c10::Stream& stream, const Target& target, int64_t piece_bytes,
             std::chrono::milliseconds timeout) override;
  void await(const c10::Stream& stream, int64_t bytes) override;
  std::shared_ptr<const Event> arrival() const override;
  int64_t bounced() const override { return bounced_.load(); }
  int64_t enqueued() const override { return enqueued_; }
  void hold() override;
  void release() override;

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
