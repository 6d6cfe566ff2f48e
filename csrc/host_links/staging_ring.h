// Pinned host memory between a device and a socket link.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "copy_engine/message_ring.h"
#include "copy_engine/registered_pages.h"

namespace ldt {

/// Slots that pieces of messages take in turn. Piece n lies in slot n % kSlots, and each of the two
/// counts the pieces that it is done with, in order.
class StagingRing : public std::enable_shared_from_this<StagingRing> {
 public:
  static constexpr uint64_t kSlots = 4;
  static constexpr int64_t kSlotBytes = int64_t{8} << 20;
  /// The size of every piece of a message but the last, the same at both ends: a sixteenth, so that
  /// the queue of a device holds several messages, but no less than 1 MiB.
  static int64_t piece_bytes(int64_t message_bytes);

  explicit StagingRing(c10::Device device);

  char* slot(uint64_t piece) const;
  /// The first `bytes` of a slot, for the link.
  at::Tensor bytes_of(uint64_t piece, int64_t bytes);
  void note_user(const c10::Stream& stream) { pages_.note_user(stream); }

  Flag& by_device() const { return flags_->by_device; }
  Flag& by_link() const { return flags_->by_link; }

 private:
  struct Flags {
    Flag by_device;
    Flag by_link;
  };

  RegisteredPages pages_;
  Flags* const flags_;
};

}  // namespace ldt
