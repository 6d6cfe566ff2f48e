// Empties slots in the order of the stream.
#include "host_links/host_receiver.h"

#include <algorithm>

namespace ldt {

void HostReceiver::begin(const c10::Stream& stream, const Target& target, int64_t /*piece_bytes*/,
                         std::chrono::milliseconds /*timeout*/) {
  ring_->note_user(stream);
  target_ = target;
  asked_ = done_ = 0;
  const auto whole = StagingRing::piece_bytes(target.bytes);
  for (int64_t posted = 0; posted < target.bytes; posted += whole) {
    transfers_.add(std::min(whole, target.bytes - posted));
  }
}

void HostReceiver::await(const c10::Stream& stream, int64_t bytes) {
  const auto whole = StagingRing::piece_bytes(target_.bytes);
  asked_ = std::min(asked_ + bytes, target_.bytes);
  while (done_ < asked_) {
    enqueued_ += kOperationsOfPiece;
    const auto part = std::min(whole, target_.bytes - done_);
    engine_.wait_for(stream, ring_->by_link(), piece_ + 1);
    engine_.copy(stream, target_.address + done_, ring_->slot(piece_), static_cast<size_t>(part));
    engine_.write(stream, ring_->by_device(), ++piece_);
    done_ += part;
  }
}

}  // namespace ldt
