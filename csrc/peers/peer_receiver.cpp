// Posting memory, and waiting for what comes into it or through the bounce slots.
#include "peers/peer_receiver.h"

#include <algorithm>
#include <list>
#include <mutex>
#include <sstream>

namespace ldt {
namespace {

// Memory that the other process still has mapped after this end was done with it.
class Leftovers {
 public:
  void keep(std::shared_ptr<SharedLedger> ledger, std::shared_ptr<PeerMemory> memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.remove_if([](const auto& one) { return !(*one.first)->is_mapped.load(); });
    if ((*ledger)->is_mapped.load()) kept_.emplace_back(std::move(ledger), std::move(memory));
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<std::shared_ptr<SharedLedger>, std::shared_ptr<PeerMemory>>> kept_;
};

Leftovers& leftovers() {
  static auto* const made = new Leftovers;  // what is left at exit goes with the process
  return *made;
}

}  // namespace

PeerReceiver::PeerReceiver(std::shared_ptr<PeerMemory> memory)
    : memory_(std::move(memory)),
      driver_(require_peer_device(memory_->device())),
      ledger_(std::make_shared<SharedLedger>(memory_->device())),
      bounce_(memory_->lend(Ledger::kBounceSlots * Ledger::kBounceSlotBytes)) {
  number_of(memory_->place_of(bounce_.data_ptr())->block);
}

PeerReceiver::~PeerReceiver() { leftovers().keep(std::move(ledger_), std::move(memory_)); }

std::string PeerReceiver::offer() const { return c10::str(host_id(), " ", ledger_->ticket()); }

std::optional<uint32_t> PeerReceiver::number_of(size_t block) {
  const auto found = std::find(listed_.begin(), listed_.end(), block);
  const auto number = static_cast<uint32_t>(found - listed_.begin());
  if (found == listed_.end()) {
    if (number == Ledger::kMaxBlocks) return std::nullopt;
    (*ledger_)->blocks[number] = memory_->exported(block);
    listed_.push_back(block);
  }
  return number;
}

void PeerReceiver::begin(const c10::Stream& stream, const Target& target, int64_t grain,
                         std::chrono::milliseconds patience) {
  const auto bytes = static_cast<uint64_t>(target.bytes);
  Posting posting;
  const auto place = target.may_post ? memory_->place_of(target.address) : std::nullopt;
  const auto block = place ? number_of(place->block) : std::nullopt;
  if (block) {
    posting = {bytes, static_cast<uint64_t>(place->offset), static_cast<uint64_t>(grain),
               target.is_free ? 0 : readied_ + 1, *block};
  }
  const auto meet = [&] {
    return block ? (*ledger_)->receiver_post(number_, posting)
                 : (*ledger_)->receiver_bounce(number_, bytes);
  };
  now_ = {target, meet_in(meet, bytes, patience) == Ledger::Course::kPosted, grain, 0, arrived_};
  ++number_;
  if (!now_.is_posted) return;
  arrived_ += (bytes + grain - 1) / grain;
  if (posting.ready != 0) driver_.write(stream, (*ledger_)->ready, ++readied_);
}

void PeerReceiver::await(const c10::Stream& stream, int64_t bytes) {
  const auto wanted = std::min(now_.done + bytes, now_.target.bytes);
  now_.is_posted ? await_posted(stream, wanted) : await_bounced(stream, wanted);
}

void PeerReceiver::await_posted(const c10::Stream& stream, int64_t wanted) {
  const auto grains = static_cast<uint64_t>((wanted + now_.grain - 1) / now_.grain);
  driver_.wait_for(stream, (*ledger_)->arrived, now_.arrived_before + grains);
  now_.done = std::min(now_.target.bytes, static_cast<int64_t>(grains) * now_.grain);
}

void PeerReceiver::await_bounced(const c10::Stream& stream, int64_t wanted) {
  while (now_.done < wanted) {
    const auto bytes = std::min(Ledger::kBounceSlotBytes, now_.target.bytes - now_.done);
    const auto slot = static_cast<int64_t>(freed_ % Ledger::kBounceSlots);
    const auto* source = static_cast<char*>(bounce_.data_ptr()) + slot * Ledger::kBounceSlotBytes;
    driver_.wait_for(stream, (*ledger_)->arrived, ++arrived_);
    driver_.copy(stream, now_.target.address + now_.done, source, static_cast<size_t>(bytes));
    driver_.write(stream, (*ledger_)->freed, ++freed_);
    now_.done += bytes;
  }
}

void PeerReceiver::abort() {
  (*ledger_)->arrived.release();
  (*ledger_)->freed.hold();
  (*ledger_)->ready.hold();
}

}  // namespace ldt
