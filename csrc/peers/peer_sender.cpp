// Copying to where the receiver posted memory, or to the bounce slots.
#include "peers/peer_sender.h"

#include <algorithm>

namespace ldt {
namespace {

std::string ticket_of(const std::string& offer) {
  const auto space = offer.find(' ');
  if (space == std::string::npos) throw_lane_error("not the offer of a receiver: '", offer, "'");
  if (offer.substr(0, space) != host_id()) throw_lane_error("it is on another host");
  return offer.substr(space + 1);
}

}  // namespace

PeerSender::PeerSender(c10::Device device, const std::string& offer)
    : device_(device),
      driver_(require_peer_device(device)),
      ledger_(std::make_unique<SharedLedger>(device, ticket_of(offer))) {
  map(0);  // now, as this is where a refusal must show
}

PeerSender::~PeerSender() {
  for (auto* address : mapped_) {
    if (address != nullptr) driver_.unmap(device_, address);
  }
  (*ledger_)->is_mapped.store(false);
}

char* PeerSender::map(uint32_t block) {
  auto*& address = mapped_.at(block);
  if (address == nullptr) {
    const auto& exported = (*ledger_)->blocks[block];
    address = static_cast<char*>(driver_.map(device_, exported.handle, exported.bytes));
    (*ledger_)->is_mapped.store(true);
  }
  return address;
}

void PeerSender::begin(const c10::Stream& stream, int64_t bytes,
                       std::chrono::milliseconds patience) {
  Posting posting;
  const auto size = static_cast<uint64_t>(bytes);
  const auto meet = [&] { return (*ledger_)->sender_take(number_, size, posting); };
  const bool is_posted = meet_in(meet, size, patience) == Ledger::Course::kPosted;
  ++number_;
  now_ = {nullptr, bytes, Ledger::kBounceSlotBytes, 0};
  if (!is_posted) return;
  now_.target = map(posting.block) + posting.offset;
  now_.grain = static_cast<int64_t>(posting.grain);
  if (posting.ready != 0) driver_.wait_for(stream, (*ledger_)->ready, posting.ready);
}

void PeerSender::push(const c10::Stream& stream, const char* source, int64_t bytes) {
  // A flag is written behind each whole grain, and behind the end of the message.
  while (bytes > 0) {
    const auto filled = now_.done % now_.grain;
    const auto size = std::min(bytes, now_.grain - filled);
    now_.target != nullptr ? copy_posted(stream, source, size)
                           : copy_bounced(stream, source, size, filled);
    now_.done += size;
    source += size;
    bytes -= size;
    if (now_.done % now_.grain == 0 || now_.done == now_.bytes) {
      driver_.write(stream, (*ledger_)->arrived, ++arrived_);
      bounced_ += now_.target == nullptr ? 1 : 0;
    }
  }
}

void PeerSender::copy_posted(const c10::Stream& stream, const char* source, int64_t bytes) {
  driver_.copy(stream, now_.target + now_.done, source, static_cast<size_t>(bytes));
}

void PeerSender::copy_bounced(const c10::Stream& stream, const char* source, int64_t bytes,
                              int64_t filled) {
  if (filled == 0 && bounced_ >= Ledger::kBounceSlots) {
    driver_.wait_for(stream, (*ledger_)->freed, bounced_ - Ledger::kBounceSlots + 1);
  }
  const auto slot = static_cast<int64_t>(bounced_ % Ledger::kBounceSlots);
  auto* target = map(0) + slot * Ledger::kBounceSlotBytes + filled;
  driver_.copy(stream, target, source, static_cast<size_t>(bytes));
}

void PeerSender::abort() {
  (*ledger_)->arrived.hold();
  (*ledger_)->freed.release();
  (*ledger_)->ready.release();
}

}  // namespace ldt
