// Writing to where the receiver posted memory or to the bounce slots, or letting it read.
#include "copy_engine/sender.h"

#include <algorithm>

#include "copy_engine/flag_event.h"

namespace ldt {
namespace {

std::string ticket_of(const std::string& offer) {
  const auto space = offer.find(' ');
  if (space == std::string::npos) throw_lane_error("not the offer of a receiver: '", offer, "'");
  if (offer.substr(0, space) != host_id()) throw_lane_error("it is on another host");
  return offer.substr(space + 1);
}

}  // namespace

PeerSender::PeerSender(c10::Device device, const std::string& offer,
                       std::shared_ptr<PeerMemory> memory)
    : driver_(require_peer_device(device)),
      ledger_(std::make_shared<SharedLedger>(device, ticket_of(offer))),
      imports_(device, ledger_, Ledger::Side::kReceiver) {
  if (memory) exports_.emplace(std::move(memory), ledger_, Ledger::Side::kSender);
  imports_.address_of(0, 0, 0);  // the bounce slots: this is where a refusal must show
}

void PeerSender::begin(const c10::Stream& stream, const Source& source,
                       std::chrono::milliseconds patience) {
  Proposal mine;
  mine.bytes = static_cast<uint64_t>(source.bytes);
  mine.grain = static_cast<uint64_t>(source.grain);
  if (source.may_offer && exports_) exports_->locate(source.address, mine);
  ++enqueued_;  // what tells, or waits, that the target is free
  ledger_->note_use(stream);
  const auto outcome = meet_in(*ledger_, number_, Ledger::Side::kSender, mine, patience);
  ++number_;
  course_ = outcome.course;
  source_ = source;
  done_ = 0;
  const bool is_bounced = course_ == Ledger::Course::kBounced;
  grain_ = is_bounced ? Ledger::kBounceSlotBytes : static_cast<int64_t>(outcome.decided.grain);
  if (course_ == Ledger::Course::kPosted) {
    target_ = imports_.address_of(outcome.decided.block, outcome.decided.offset, mine.bytes);
    if (outcome.decided.ready != 0) {
      driver_.wait_for(stream, (*ledger_)->ready, outcome.decided.ready);
    }
  }
  if (course_ == Ledger::Course::kOffered) ++offered_;
}

void PeerSender::push(const c10::Stream& stream, int64_t bytes) {
  // The flag is written behind each whole grain, and behind the end of the message.
  const auto until = std::min(done_ + bytes, source_.bytes);
  while (done_ < until) {
    enqueued_ += kOperationsOfPiece;
    const auto piece = std::min(until - done_, grain_ - done_ % grain_);
    if (course_ != Ledger::Course::kOffered) copy(stream, piece);
    done_ += piece;
    if (done_ % grain_ != 0 && done_ != source_.bytes) continue;
    driver_.write(stream, (*ledger_)->arrived, ++arrived_);
    if (course_ == Ledger::Course::kBounced) ++bounced_;
  }
}

void PeerSender::copy(const c10::Stream& stream, int64_t bytes) {
  auto* target = target_ + done_;
  if (course_ == Ledger::Course::kBounced) {
    const auto filled = done_ % grain_;
    if (filled == 0 && bounced_ >= Ledger::kBounceSlots) {
      driver_.wait_for(stream, (*ledger_)->freed, bounced_ - Ledger::kBounceSlots + 1);
    }
    const auto slot = static_cast<int64_t>(bounced_ % Ledger::kBounceSlots);
    target = imports_.address_of(0, static_cast<uint64_t>(slot * grain_ + filled),
                                 static_cast<uint64_t>(bytes));
  }
  driver_.copy(stream, target, source_.address + done_, static_cast<size_t>(bytes));
}

std::shared_ptr<const Event> PeerSender::sent() const {
  return std::make_shared<LocalFlagEvent>(driver_, ledger_, (*ledger_)->arrived, arrived_);
}

std::shared_ptr<const Event> PeerSender::taken() const {
  if (offered_ == 0) return nullptr;
  return std::make_shared<FlagEvent>(driver_, ledger_, (*ledger_)->taken, offered_);
}

void PeerSender::hold() { (*ledger_)->arrived.hold(); }

void PeerSender::release() {
  for (auto* flag : {&(*ledger_)->freed, &(*ledger_)->ready, &(*ledger_)->taken}) flag->release();
}

}  // namespace ldt
