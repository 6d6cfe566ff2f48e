// Memory to write to, memory to read from, or the bounce slots.
#include "copy_engine/receiver.h"

#include <algorithm>

#include "copy_engine/flag_event.h"

namespace ldt {
namespace {

uint64_t grains_in(int64_t bytes, uint64_t grain) {
  return (static_cast<uint64_t>(bytes) + grain - 1) / grain;
}

}  // namespace

PeerReceiver::PeerReceiver(std::shared_ptr<PeerMemory> memory)
    : driver_(require_peer_device(memory->device())),
      ledger_(std::make_shared<SharedLedger>(memory->device())),
      exports_(memory, ledger_, Ledger::Side::kReceiver),
      imports_(memory->device(), ledger_, Ledger::Side::kSender),
      bounce_(memory->lend(Ledger::kBounceSlots * Ledger::kBounceSlotBytes)) {
  Proposal first;
  exports_.locate(bounce_.const_data_ptr(), first);
}

std::string PeerReceiver::offer() const { return c10::str(host_id(), " ", ledger_->ticket()); }

void PeerReceiver::begin(const c10::Stream& stream, const Target& target, int64_t grain,
                         std::chrono::milliseconds patience) {
  Proposal mine;
  mine.bytes = static_cast<uint64_t>(target.bytes);
  mine.grain = static_cast<uint64_t>(grain);
  if (target.may_post && exports_.locate(target.address, mine) && !target.is_free) {
    mine.ready = readied_ + 1;
  }
  ++enqueued_;  // what tells, or waits, that the target is free
  ledger_->note_use(stream);
  const auto outcome = meet_in(*ledger_, number_, Ledger::Side::kReceiver, mine, patience);
  ++number_;
  course_ = outcome.course;
  decided_ = outcome.decided;
  if (course_ == Ledger::Course::kBounced) {
    decided_.grain = Ledger::kBounceSlotBytes;
    ++bounced_;
  }
  target_ = target;
  asked_ = done_ = 0;
  arrived_before_ = arrived_;
  arrived_ += grains_in(target.bytes, decided_.grain);
  if (course_ == Ledger::Course::kPosted && mine.ready != 0) {
    driver_.write(stream, (*ledger_)->ready, ++readied_);
  }
}

void PeerReceiver::await(const c10::Stream& stream, int64_t bytes) {
  asked_ = std::min(asked_ + bytes, target_.bytes);
  if (asked_ <= done_) return;
  switch (course_) {
    case Ledger::Course::kPosted: return await_posted(stream, asked_);
    case Ledger::Course::kOffered: return take_offered(stream, asked_);
    default: return await_bounced(stream, asked_);
  }
}

void PeerReceiver::await_posted(const c10::Stream& stream, int64_t wanted) {
  const auto grains = grains_in(wanted, decided_.grain);
  ++enqueued_;
  driver_.wait_for(stream, (*ledger_)->arrived, arrived_before_ + grains);
  done_ = std::min(target_.bytes, static_cast<int64_t>(grains * decided_.grain));
}

void PeerReceiver::take_offered(const c10::Stream& stream, int64_t wanted) {
  const auto* source = imports_.address_of(decided_.block, decided_.offset, decided_.bytes);
  while (done_ < wanted) {
    enqueued_ += kOperationsOfPiece;
    const auto bytes = std::min(static_cast<int64_t>(decided_.grain), target_.bytes - done_);
    const auto grains = grains_in(done_ + bytes, decided_.grain);
    driver_.wait_for(stream, (*ledger_)->arrived, arrived_before_ + grains);
    driver_.copy(stream, target_.address + done_, source + done_, static_cast<size_t>(bytes));
    done_ += bytes;
  }
  if (done_ == target_.bytes) driver_.write(stream, (*ledger_)->taken, ++taken_);
}

void PeerReceiver::await_bounced(const c10::Stream& stream, int64_t wanted) {
  const auto* slots = static_cast<const char*>(bounce_.const_data_ptr());
  while (done_ < wanted) {
    enqueued_ += kOperationsOfPiece;
    const auto bytes = std::min(Ledger::kBounceSlotBytes, target_.bytes - done_);
    const auto slot = static_cast<int64_t>(freed_ % Ledger::kBounceSlots);
    const auto grains = grains_in(done_ + bytes, decided_.grain);
    driver_.wait_for(stream, (*ledger_)->arrived, arrived_before_ + grains);
    driver_.copy(stream, target_.address + done_, slots + slot * Ledger::kBounceSlotBytes,
                 static_cast<size_t>(bytes));
    driver_.write(stream, (*ledger_)->freed, ++freed_);
    done_ += bytes;
  }
}

std::shared_ptr<const Event> PeerReceiver::end() const {
  return std::make_shared<FlagEvent>(driver_, ledger_, (*ledger_)->arrived, arrived_);
}

void PeerReceiver::hold() {
  for (auto* flag : {&(*ledger_)->freed, &(*ledger_)->ready, &(*ledger_)->taken}) flag->hold();
}

void PeerReceiver::release() { (*ledger_)->arrived.release(); }

}  // namespace ldt
