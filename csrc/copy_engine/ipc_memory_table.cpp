// Exports and maps blocks on first use.
#include "copy_engine/ipc_memory_table.h"

#include <algorithm>

#include "copy_engine/deferred_free.h"

namespace ldt {

ExportedMemory::ExportedMemory(std::shared_ptr<IpcPool> memory, std::shared_ptr<SharedRing> ring,
                               MessageRing::Side side)
    : memory_(std::move(memory)), ring_(std::move(ring)), side_(side) {}

ExportedMemory::~ExportedMemory() {
  free_when([ring = ring_, side = side_] { return !(*ring)->is_mapped(side).load(); }, memory_);
}

bool ExportedMemory::locate(const void* address, Proposal& proposal) {
  const auto place = memory_->place_of(address);
  if (!place) return false;
  const auto found = std::find(listed_.begin(), listed_.end(), place->block);
  const auto number = static_cast<uint32_t>(found - listed_.begin());
  if (found == listed_.end()) {
    if (number == MessageRing::kMaxBlocks) return false;
    (*ring_)->blocks_of(side_)[number] = memory_->exported(place->block);
    listed_.push_back(place->block);
  }
  proposal.has_memory = true;
  proposal.block = number;
  proposal.offset = static_cast<uint64_t>(place->offset);
  return true;
}

ImportedMemory::ImportedMemory(c10::Device device, std::shared_ptr<SharedRing> ring,
                               MessageRing::Side other_side)
    : mapped_(new Mapped{device, require_copy_engine(device), std::move(ring), other_side, {}}) {}

ImportedMemory::~ImportedMemory() {
  try {
    free_when(mapped_->ring->enqueued_is_done(), mapped_);
  } catch (const std::exception&) {  // the device is gone, as at interpreter exit
  }
}

ImportedMemory::Mapped::~Mapped() {
  for (auto* address : addresses) {
    if (address != nullptr) engine.unmap(device, address);
  }
  (*ring)->is_mapped(other_side).store(false);
}

char* ImportedMemory::address_of(uint32_t block, uint64_t offset, uint64_t bytes) {
  auto& [device, engine, ring, other_side, addresses] = *mapped_;
  auto*& address = addresses.at(block);
  const auto& exported = (*ring)->blocks_of(other_side)[block];
  if (offset > exported.bytes || bytes > exported.bytes - offset) {
    throw_lane_error("the other end proposes ", bytes, " bytes at ", offset, " of a block of ",
                     exported.bytes);
  }
  if (address == nullptr) {
    (*ring)->is_mapped(other_side).store(true);
    address = static_cast<char*>(engine.map(device, exported.handle, exported.bytes));
  }
  return address + offset;
}

}  // namespace ldt
