// Each entry cycles: it is open for a message, the first end takes it, and the second end opens it
// for the message kEntries later.
#include "copy_engine/message_ring.h"

namespace ldt {
namespace {

enum class Phase : uint64_t { kOpen, kReceiverFirst, kSenderFirst };

constexpr uint64_t state_of(uint64_t number, Phase phase) {
  return number << 2 | static_cast<uint64_t>(phase);
}

constexpr Phase first_is(MessageRing::Side side) {
  return side == MessageRing::Side::kReceiver ? Phase::kReceiverFirst : Phase::kSenderFirst;
}

constexpr MessageRing::Side other(MessageRing::Side side) {
  return side == MessageRing::Side::kReceiver ? MessageRing::Side::kSender
                                              : MessageRing::Side::kReceiver;
}

MessageRing::Protocol protocol_of(MessageRing::Side first, const Proposal& decided) {
  if (!decided.has_memory) return MessageRing::Protocol::kBounced;
  return first == MessageRing::Side::kReceiver ? MessageRing::Protocol::kPosted
                                               : MessageRing::Protocol::kOffered;
}

}  // namespace

MessageRing::MessageRing() {
  for (uint64_t number = 0; number < kEntries; ++number) {
    entries_[number].state.store(state_of(number, Phase::kOpen));
  }
}

MessageRing::Outcome MessageRing::match(uint64_t number, Side side, const Proposal& mine) {
  auto& entry = entries_[number % kEntries];
  auto open = state_of(number, Phase::kOpen);
  if (entry.state.load() == open) {
    entry.proposals[static_cast<size_t>(side)] = mine;
    if (entry.state.compare_exchange_strong(open, state_of(number, first_is(side)))) {
      return {protocol_of(side, mine), mine, 0};
    }
  }
  if (entry.state.load() != state_of(number, first_is(other(side)))) return {};
  const auto theirs = entry.proposals[static_cast<size_t>(other(side))];
  entry.state.store(state_of(number + kEntries, Phase::kOpen));
  return {protocol_of(other(side), theirs), theirs, theirs.bytes};
}

}  // namespace ldt
