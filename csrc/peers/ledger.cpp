// Each entry goes around: open for message n, decided by who comes first, opened for message n +
// kEntries by the other.
#include "peers/ledger.h"

namespace ldt {
namespace {

// The state of an entry: the number of its message and what is known of it.
constexpr uint64_t kOpen = 0;
constexpr uint64_t kHasPosting = 1;
constexpr uint64_t kSenderBounced = 2;
constexpr uint64_t kReceiverBounced = 3;

constexpr uint64_t state_of(uint64_t number, uint64_t verdict) { return number << 2 | verdict; }

}  // namespace

Ledger::Ledger() {
  for (uint64_t number = 0; number < kEntries; ++number) {
    entries_[number].state.store(state_of(number, kOpen));
  }
}

bool Ledger::come_first(Entry& entry, uint64_t number, uint64_t verdict) {
  auto open = state_of(number, kOpen);
  return entry.state.compare_exchange_strong(open, state_of(number, verdict));
}

Ledger::Outcome Ledger::receive(uint64_t number, const Posting& posting, uint64_t verdict) {
  auto& entry = entries_[number % kEntries];
  if (entry.state.load() == state_of(number, kOpen)) {
    entry.posting = posting;
    if (come_first(entry, number, verdict)) {
      return {verdict == kHasPosting ? Course::kPosted : Course::kBounced};
    }
  }
  if (entry.state.load() != state_of(number, kSenderBounced)) return {Course::kTooFar};
  const Outcome outcome{Course::kBounced, entry.sender_bytes};
  entry.state.store(state_of(number + kEntries, kOpen));
  return outcome;
}

Ledger::Outcome Ledger::receiver_post(uint64_t number, const Posting& posting) {
  return receive(number, posting, kHasPosting);
}

Ledger::Outcome Ledger::receiver_bounce(uint64_t number, uint64_t bytes) {
  Posting nowhere;
  nowhere.bytes = bytes;
  return receive(number, nowhere, kReceiverBounced);
}

Ledger::Outcome Ledger::sender_take(uint64_t number, uint64_t bytes, Posting& posting) {
  auto& entry = entries_[number % kEntries];
  if (entry.state.load() == state_of(number, kOpen)) {
    entry.sender_bytes = bytes;
    if (come_first(entry, number, kSenderBounced)) return {Course::kBounced};
  }
  const auto state = entry.state.load();
  const bool posted = state == state_of(number, kHasPosting);
  if (!posted && state != state_of(number, kReceiverBounced)) return {Course::kTooFar};
  posting = entry.posting;
  entry.state.store(state_of(number + kEntries, kOpen));
  return {posted ? Course::kPosted : Course::kBounced, posting.bytes};
}

}  // namespace ldt
