// Fills slots in the order of the stream.
#include "host_links/host_sender.h"

#include <algorithm>

namespace ldt {

void HostSender::begin(const c10::Stream& stream, const Source& source,
                       std::chrono::milliseconds /*timeout*/) {
  ring_->note_user(stream);
  source_ = source;
  done_ = 0;
}

void HostSender::push(const c10::Stream& stream, int64_t bytes) {
  const auto whole = StagingRing::piece_bytes(source_.bytes);
  const auto until = std::min(done_ + bytes, source_.bytes);
  while (done_ < until) {
    enqueued_ += kOperationsOfPiece;
    const auto filled = done_ % whole;
    const auto part = std::min(until - done_, whole - filled);
    if (filled == 0 && piece_ >= StagingRing::kSlots) {
      engine_.wait_for(stream, ring_->by_link(), piece_ + 1 - StagingRing::kSlots);
    }
    engine_.copy(stream, ring_->slot(piece_) + filled, source_.address + done_,
                 static_cast<size_t>(part));
    done_ += part;
    if (filled + part < whole && done_ != source_.bytes) continue;
    engine_.write(stream, ring_->by_device(), ++piece_);
    transfers_.add(filled + part);
  }
}

}  // namespace ldt
