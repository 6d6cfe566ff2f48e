// Posts memory, reads from the sender's, or copies from the bounce slots.
#include "copy_engine/receiver.h"

#include <algorithm>

#include "copy_engine/flag_event.h"

namespace ldt {
namespace {

uint64_t pieces_in(int64_t bytes, uint64_t piece_bytes) {
  return (static_cast<uint64_t>(bytes) + piece_bytes - 1) / piece_bytes;
}

}  // namespace

IpcReceiver::IpcReceiver(std::shared_ptr<IpcPool> memory)
    : engine_(require_copy_engine(memory->device())),
      ring_(std::make_shared<SharedRing>(memory->device())),
      exports_(memory, ring_, MessageRing::Side::kReceiver),
      imports_(memory->device(), ring_, MessageRing::Side::kSender),
      bounce_(memory->allocate(MessageRing::kBounceSlots * MessageRing::kBounceSlotBytes)) {
  Proposal first;
  exports_.locate(bounce_.const_data_ptr(), first);
}

std::string IpcReceiver::offer() const { return c10::str(host_id(), " ", ring_->handle()); }

void IpcReceiver::begin(const c10::Stream& stream, const Target& target, int64_t piece_bytes,
                        std::chrono::milliseconds timeout) {
  Proposal mine;
  mine.bytes = static_cast<uint64_t>(target.bytes);
  mine.piece_bytes = static_cast<uint64_t>(piece_bytes);
  if (target.may_post && exports_.locate(target.address, mine) && !target.is_free) {
    mine.ready = readied_ + 1;
  }
  ++enqueued_;  // signals, or waits, that the target is free
  ring_->note_user(stream);
  const auto outcome = match_message(*ring_, number_, MessageRing::Side::kReceiver, mine, timeout);
  ++number_;
  protocol_ = outcome.protocol;
  decided_ = outcome.decided;
  if (protocol_ == MessageRing::Protocol::kBounced) {
    decided_.piece_bytes = MessageRing::kBounceSlotBytes;
    ++bounced_;
  }
  target_ = target;
  asked_ = done_ = 0;
  arrived_before_ = arrived_;
  arrived_ += pieces_in(target.bytes, decided_.piece_bytes);
  if (protocol_ == MessageRing::Protocol::kPosted && mine.ready != 0) {
    engine_.write(stream, (*ring_)->ready, ++readied_);
  }
}

void IpcReceiver::await(const c10::Stream& stream, int64_t bytes) {
  asked_ = std::min(asked_ + bytes, target_.bytes);
  if (asked_ <= done_) return;
  switch (protocol_) {
    case MessageRing::Protocol::kPosted: return await_posted(stream, asked_);
    case MessageRing::Protocol::kOffered: return copy_offered(stream, asked_);
    default: return await_bounced(stream, asked_);
  }
}

void IpcReceiver::await_posted(const c10::Stream& stream, int64_t wanted) {
  const auto pieces = pieces_in(wanted, decided_.piece_bytes);
  ++enqueued_;
  engine_.wait_for(stream, (*ring_)->arrived, arrived_before_ + pieces);
  done_ = std::min(target_.bytes, static_cast<int64_t>(pieces * decided_.piece_bytes));
}

void IpcReceiver::copy_offered(const c10::Stream& stream, int64_t wanted) {
  const auto* source = imports_.address_of(decided_.block, decided_.offset, decided_.bytes);
  while (done_ < wanted) {
    enqueued_ += kOperationsOfPiece;
    const auto bytes = std::min(static_cast<int64_t>(decided_.piece_bytes), target_.bytes - done_);
    const auto pieces = pieces_in(done_ + bytes, decided_.piece_bytes);
    engine_.wait_for(stream, (*ring_)->arrived, arrived_before_ + pieces);
    engine_.copy(stream, target_.address + done_, source + done_, static_cast<size_t>(bytes));
    done_ += bytes;
  }
  if (done_ == target_.bytes) engine_.write(stream, (*ring_)->taken, ++taken_);
}

void IpcReceiver::await_bounced(const c10::Stream& stream, int64_t wanted) {
  const auto* slots = static_cast<const char*>(bounce_.const_data_ptr());
  while (done_ < wanted) {
    enqueued_ += kOperationsOfPiece;
    const auto bytes = std::min(MessageRing::kBounceSlotBytes, target_.bytes - done_);
    const auto slot = static_cast<int64_t>(freed_ % MessageRing::kBounceSlots);
    const auto pieces = pieces_in(done_ + bytes, decided_.piece_bytes);
    engine_.wait_for(stream, (*ring_)->arrived, arrived_before_ + pieces);
    engine_.copy(stream, target_.address + done_, slots + slot * MessageRing::kBounceSlotBytes,
                 static_cast<size_t>(bytes));
    engine_.write(stream, (*ring_)->freed, ++freed_);
    done_ += bytes;
  }
}

std::shared_ptr<const Event> IpcReceiver::arrival() const {
  if (protocol_ != MessageRing::Protocol::kPosted) return nullptr;
  return std::make_shared<FlagEvent>(engine_, ring_, (*ring_)->arrived, arrived_);
}

void IpcReceiver::hold() {
  for (auto* flag : {&(*ring_)->freed, &(*ring_)->ready, &(*ring_)->taken}) flag->hold();
}

void IpcReceiver::release() { (*ring_)->arrived.release(); }

}  // namespace ldt
