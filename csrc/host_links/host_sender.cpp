// Fills slots in the order of the stream.
#include "host_links/host_sender.h"

#include <algorithm>

#include "copy_engine/shared_ring.h"

namespace ldt {

HostSender::HostSender(c10::Device device, std::shared_ptr<SocketLink> link, uint32_t lane)
    : engine_(require_copy_engine(device)),
      ring_(std::make_shared<StagingRing>(device)),
      transfers_(ring_, std::move(link), lane, StagedTransfers::Direction::kSend) {}

void HostSender::begin(const c10::Stream& stream, const Source& source,
                       std::chrono::milliseconds /*timeout*/) {
  ring_->note_user(stream);
  source_ = source;
  piece_bytes_ = StagingRing::piece_bytes(source.bytes);
  done_ = 0;
}

void HostSender::push(const c10::Stream& stream, int64_t bytes) {
  const auto until = std::min(done_ + bytes, source_.bytes);
  while (done_ < until) {
    enqueued_ += kOperationsOfPiece;
    const auto filled = done_ % piece_bytes_;
    const auto part = std::min(until - done_, piece_bytes_ - filled);
    if (filled == 0 && piece_ >= StagingRing::kSlots) {
      engine_.wait_for(stream, ring_->by_link(), piece_ + 1 - StagingRing::kSlots);
    }
    engine_.copy(stream, ring_->slot(piece_) + filled, source_.address + done_,
                 static_cast<size_t>(part));
    done_ += part;
    if (filled + part < piece_bytes_ && done_ != source_.bytes) continue;
    engine_.write(stream, ring_->by_device(), ++piece_);
    transfers_.add(filled + part);
  }
}

}  // namespace ldt
