// Tables of memory in a ledger: written by the side that exports it, read by the side that maps it.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "copy_engine/ipc_pool.h"
#include "copy_engine/shared_ring.h"

namespace ldt {

/// This side's memory, as far as the other one may use it.
class ExportedMemory {
 public:
  ExportedMemory(std::shared_ptr<IpcPool> memory, std::shared_ptr<SharedRing> ring,
                 MessageRing::Side side);
  ~ExportedMemory();

  /// Fills in where `address` lies. False if the other side cannot get at it.
  bool locate(const void* address, Proposal& proposal);

 private:
  std::shared_ptr<IpcPool> memory_;
  std::shared_ptr<SharedRing> ring_;
  const MessageRing::Side side_;
  std::vector<size_t> listed_;  // blocks of memory_ in the order of the ledger's table
};

/// The other side's memory.
class ImportedMemory {
 public:
  ImportedMemory(c10::Device device, std::shared_ptr<SharedRing> ring,
                 MessageRing::Side other_side);
  ~ImportedMemory();

  /// Where `bytes` lie that the other side has proposed. Maps the block on first use. Throws
  /// LaneError if the driver refuses, or if they are not within the block.
  char* address_of(uint32_t block, uint64_t offset, uint64_t bytes);

 private:
  // Stays until nothing that is enqueued copies from or to it.
  struct Mapped {
    ~Mapped();

    const c10::Device device;
    CopyEngine& engine;
    const std::shared_ptr<SharedRing> ring;
    const MessageRing::Side other_side;
    std::array<char*, MessageRing::kMaxBlocks> addresses;
  };

  const std::shared_ptr<Mapped> mapped_;
};

}  // namespace ldt
