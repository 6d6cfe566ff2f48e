// Writes to memory that the receiver posted or to the bounce slots, or lets the receiver read.
#include "copy_engine/sender.h"

#include <algorithm>

#include "copy_engine/flag_event.h"

namespace ldt {
namespace {

std::string handle_of(const std::string& offer) {
  const auto space = offer.find(' ');
  if (space == std::string::npos) throw_lane_error("not the offer of a receiver: '", offer, "'");
  if (offer.substr(0, space) != host_id()) throw_lane_error("it is on another host");
  return offer.substr(space + 1);
}

}  // namespace

IpcSender::IpcSender(c10::Device device, const std::string& offer, std::shared_ptr<IpcPool> memory)
    : engine_(require_copy_engine(device)),
      ring_(std::make_shared<SharedRing>(device, handle_of(offer))),
      imports_(device, ring_, MessageRing::Side::kReceiver) {
  if (memory) exports_.emplace(std::move(memory), ring_, MessageRing::Side::kSender);
  imports_.address_of(0, 0, 0);  // maps the bounce slots now: a refusal must show here
}

void IpcSender::begin(const c10::Stream& stream, const Source& source,
                      std::chrono::milliseconds timeout) {
  Proposal mine;
  mine.bytes = static_cast<uint64_t>(source.bytes);
  mine.piece_bytes = static_cast<uint64_t>(source.piece_bytes);
  if (source.may_offer && exports_) exports_->locate(source.address, mine);
  ++enqueued_;  // signals, or waits, that the target is free
  ring_->note_user(stream);
  const auto outcome = match_message(*ring_, number_, MessageRing::Side::kSender, mine, timeout);
  ++number_;
  protocol_ = outcome.protocol;
  source_ = source;
  done_ = 0;
  const bool is_bounced = protocol_ == MessageRing::Protocol::kBounced;
  piece_bytes_ = is_bounced ? MessageRing::kBounceSlotBytes
                            : static_cast<int64_t>(outcome.decided.piece_bytes);
  if (protocol_ == MessageRing::Protocol::kPosted) {
    target_ = imports_.address_of(outcome.decided.block, outcome.decided.offset, mine.bytes);
    if (outcome.decided.ready != 0) {
      engine_.wait_for(stream, (*ring_)->ready, outcome.decided.ready);
    }
  }
  if (protocol_ == MessageRing::Protocol::kOffered) ++offered_;
}

void IpcSender::push(const c10::Stream& stream, int64_t bytes) {
  // Writes the flag after each whole piece and at the end of the message.
  const auto until = std::min(done_ + bytes, source_.bytes);
  while (done_ < until) {
    enqueued_ += kOperationsOfPiece;
    const auto part = std::min(until - done_, piece_bytes_ - done_ % piece_bytes_);
    if (protocol_ != MessageRing::Protocol::kOffered) copy(stream, part);
    done_ += part;
    if (done_ % piece_bytes_ != 0 && done_ != source_.bytes) continue;
    engine_.write(stream, (*ring_)->arrived, ++arrived_);
    if (protocol_ == MessageRing::Protocol::kBounced) ++bounced_;
  }
}

void IpcSender::copy(const c10::Stream& stream, int64_t bytes) {
  auto* target = target_ + done_;
  if (protocol_ == MessageRing::Protocol::kBounced) {
    const auto filled = done_ % piece_bytes_;
    if (filled == 0 && bounced_ >= MessageRing::kBounceSlots) {
      engine_.wait_for(stream, (*ring_)->freed, bounced_ - MessageRing::kBounceSlots + 1);
    }
    const auto slot = static_cast<int64_t>(bounced_ % MessageRing::kBounceSlots);
    target = imports_.address_of(0, static_cast<uint64_t>(slot * piece_bytes_ + filled),
                                 static_cast<uint64_t>(bytes));
  }
  engine_.copy(stream, target, source_.address + done_, static_cast<size_t>(bytes));
}

std::shared_ptr<const Event> IpcSender::sent() const {
  return std::make_shared<LocalFlagEvent>(engine_, ring_, (*ring_)->arrived, arrived_);
}

std::shared_ptr<const Event> IpcSender::taken() const {
  if (offered_ == 0) return nullptr;
  return std::make_shared<FlagEvent>(engine_, ring_, (*ring_)->taken, offered_);
}

void IpcSender::hold() { (*ring_)->arrived.hold(); }

void IpcSender::release() {
  for (auto* flag : {&(*ring_)->freed, &(*ring_)->ready, &(*ring_)->taken}) flag->release();
}

}  // namespace ldt
