// Empties slots in the order of the stream.
#include "host_links/host_receiver.h"

#include <algorithm>

#include "copy_engine/shared_ring.h"

namespace ldt {

HostReceiver::HostReceiver(c10::Device device, std::shared_ptr<SocketLink> link, uint32_t lane)
    : engine_(require_copy_engine(device)),
      ring_(std::make_shared<StagingRing>(device)),
      transfers_(ring_, std::move(link), lane, StagedTransfers::Direction::kReceive) {}

void HostReceiver::begin(const c10::Stream& stream, const Target& target, int64_t /*piece_bytes*/,
                         std::chrono::milliseconds /*timeout*/) {
  ring_->note_user(stream);
  target_ = target;
  piece_bytes_ = StagingRing::piece_bytes(target.bytes);
  asked_ = done_ = 0;
  for (int64_t posted = 0; posted < target.bytes; posted += piece_bytes_) {
    transfers_.add(std::min(piece_bytes_, target.bytes - posted));
  }
}

void HostReceiver::await(const c10::Stream& stream, int64_t bytes) {
  asked_ = std::min(asked_ + bytes, target_.bytes);
  while (done_ < asked_) {
    enqueued_ += kOperationsOfPiece;
    const auto part = std::min(piece_bytes_, target_.bytes - done_);
    engine_.wait_for(stream, ring_->by_link(), piece_ + 1);
    engine_.copy(stream, target_.address + done_, ring_->slot(piece_), static_cast<size_t>(part));
    engine_.write(stream, ring_->by_device(), ++piece_);
    done_ += part;
  }
}

}  // namespace ldt
