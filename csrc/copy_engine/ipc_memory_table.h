// The memory that each end exports to the other, listed in the message ring.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "copy_engine/ipc_pool.h"
#include "copy_engine/shared_ring.h"

namespace ldt {

/// This end's memory, as far as the other end may use it.
class ExportedMemory {
 public:
  ExportedMemory(std::shared_ptr<IpcPool> memory, std::shared_ptr<SharedRing> ring,
                 MessageRing::Side side);
  ~ExportedMemory();

  /// Sets where `address` lies in the proposal. False if the other end has no access to it.
  bool locate(const void* address, Proposal& proposal);

 private:
  std::shared_ptr<IpcPool> memory_;
  std::shared_ptr<SharedRing> ring_;
  const MessageRing::Side side_;
  std::vector<size_t> listed_;  // blocks of memory_ in the order of the ring's table
};

/// The other end's memory.
class ImportedMemory {
 public:
  ImportedMemory(c10::Device device, std::shared_ptr<SharedRing> ring,
                 MessageRing::Side other_side);
  ~ImportedMemory();

  /// The address of `bytes` that the other end proposed. Maps the block on first use. Throws
  /// LaneError if the driver refuses or if they exceed the block.
  char* address_of(uint32_t block, uint64_t offset, uint64_t bytes);

 private:
  // Stays mapped until no enqueued copy uses it.
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
