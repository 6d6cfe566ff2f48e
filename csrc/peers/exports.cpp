// Exporting and mapping, block by block, when one is first used.
#include "peers/exports.h"

#include <algorithm>
#include <list>
#include <mutex>

namespace ldt {
namespace {

// Memory that the other process still has mapped when this one was done with it.
class Leftovers {
 public:
  void keep(std::shared_ptr<SharedLedger> ledger, Ledger::Side side,
            std::shared_ptr<PeerMemory> memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.remove_if([](const Kept& one) { return !(*one.ledger)->is_mapped(one.side).load(); });
    if ((*ledger)->is_mapped(side).load()) {
      kept_.push_back({std::move(ledger), side, std::move(memory)});
    }
  }

 private:
  struct Kept {
    std::shared_ptr<SharedLedger> ledger;
    Ledger::Side side;
    std::shared_ptr<PeerMemory> memory;
  };

  std::mutex mutex_;
  std::list<Kept> kept_;
};

Leftovers& leftovers() {
  static auto* const made = new Leftovers;  // what is left at exit goes with the process
  return *made;
}

}  // namespace

Exports::Exports(std::shared_ptr<PeerMemory> memory, std::shared_ptr<SharedLedger> ledger,
                 Ledger::Side side)
    : memory_(std::move(memory)), ledger_(std::move(ledger)), side_(side) {}

Exports::~Exports() { leftovers().keep(std::move(ledger_), side_, std::move(memory_)); }

bool Exports::locate(const void* address, Proposal& proposal) {
  const auto place = memory_->place_of(address);
  if (!place) return false;
  const auto found = std::find(listed_.begin(), listed_.end(), place->block);
  const auto number = static_cast<uint32_t>(found - listed_.begin());
  if (found == listed_.end()) {
    if (number == Ledger::kMaxBlocks) return false;
    (*ledger_)->blocks_of(side_)[number] = memory_->exported(place->block);
    listed_.push_back(place->block);
  }
  proposal.has_memory = true;
  proposal.block = number;
  proposal.offset = static_cast<uint64_t>(place->offset);
  return true;
}

Imports::Imports(c10::Device device, std::shared_ptr<SharedLedger> ledger, Ledger::Side other_side)
    : device_(device),
      driver_(require_peer_device(device)),
      ledger_(std::move(ledger)),
      other_side_(other_side) {}

Imports::~Imports() {
  for (auto* address : mapped_) {
    if (address != nullptr) driver_.unmap(device_, address);
  }
  (*ledger_)->is_mapped(other_side_).store(false);
}

char* Imports::address_of(uint32_t block, uint64_t offset) {
  auto*& address = mapped_.at(block);
  if (address == nullptr) {
    const auto& exported = (*ledger_)->blocks_of(other_side_)[block];
    (*ledger_)->is_mapped(other_side_).store(true);
    address = static_cast<char*>(driver_.map(device_, exported.handle, exported.bytes));
  }
  return address + offset;
}

}  // namespace ldt
