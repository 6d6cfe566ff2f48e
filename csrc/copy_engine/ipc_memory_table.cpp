// Exporting and mapping, block by block, when one is first used.
#include "copy_engine/ipc_memory_table.h"

#include <algorithm>

#include "copy_engine/deferred_free.h"

namespace ldt {

Exports::Exports(std::shared_ptr<PeerMemory> memory, std::shared_ptr<SharedLedger> ledger,
                 Ledger::Side side)
    : memory_(std::move(memory)), ledger_(std::move(ledger)), side_(side) {}

Exports::~Exports() {
  keep_until([ledger = ledger_, side = side_] { return !(*ledger)->is_mapped(side).load(); },
             memory_);
}

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
    : mapped_(new Mapped{device, require_peer_device(device), std::move(ledger), other_side, {}}) {}

Imports::~Imports() {
  try {
    keep_until(mapped_->ledger->enqueued_is_done(), mapped_);
  } catch (const std::exception&) {  // the device is gone, as at interpreter exit
  }
}

Imports::Mapped::~Mapped() {
  for (auto* address : addresses) {
    if (address != nullptr) driver.unmap(device, address);
  }
  (*ledger)->is_mapped(other_side).store(false);
}

char* Imports::address_of(uint32_t block, uint64_t offset, uint64_t bytes) {
  auto& [device, driver, ledger, other_side, addresses] = *mapped_;
  auto*& address = addresses.at(block);
  const auto& exported = (*ledger)->blocks_of(other_side)[block];
  if (offset > exported.bytes || bytes > exported.bytes - offset) {
    throw_lane_error("the other end proposes ", bytes, " bytes at ", offset, " of a block of ",
                     exported.bytes);
  }
  if (address == nullptr) {
    (*ledger)->is_mapped(other_side).store(true);
    address = static_cast<char*>(driver.map(device, exported.handle, exported.bytes));
  }
  return address + offset;
}

}  // namespace ldt
