// Where the two ends of a route write down, message by message, where its bytes go.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace ldt {

/// What a process needs to map memory of a device that another one exported: opaque bytes.
using MemoryHandle = std::array<unsigned char, 64>;

/// What devices wait for and write: a word whose lower half is a count, set by the device of the
/// other end. Waits are for the whole word, as a signed number, so whoever sets the upper half
/// decides over them all, whatever count is written after that. The end that writes the count may
/// also wait for it: for the lower half alone, which no failure holds up.
struct alignas(128) Flag {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> upper{0};

  /// What a device waits for, as the host sees it.
  bool has_reached(uint64_t wanted) const {
    const auto word = uint64_t{upper.load()} << 32 | count.load();
    return static_cast<int64_t>(word - wanted) >= 0;
  }
  /// The count alone, whatever was done to the upper half. Counts go around after 2^32.
  bool has_counted(uint64_t wanted) const {
    return static_cast<int32_t>(count.load() - static_cast<uint32_t>(wanted)) >= 0;
  }
  bool is_overridden() const { return upper.load() >= kReleased; }
  /// All waits end, for good.
  void release() { upper.store(kReleased); }
  /// No wait ends any more, unless the flag was or will be released.
  void hold() {
    uint32_t now = upper.load();
    while (now != kReleased && !upper.compare_exchange_weak(now, kHeld)) {
    }
  }

 private:
  // Far from where differences to a count would wrap around.
  static constexpr uint32_t kReleased = uint32_t{1} << 30;
  static constexpr uint32_t kHeld = uint32_t{3} << 30;
};
static_assert(std::endian::native == std::endian::little && sizeof(Flag) == 128);

/// What one end has for a message. With memory: `offset` into a block that it has exported.
struct Proposal {
  uint64_t bytes = 0;
  uint64_t grain = 0;  // `arrived` counts once for so many bytes, and once for the rest
  bool has_memory = false;
  uint32_t block = 0;
  uint64_t offset = 0;
  uint64_t ready =
      0;  // the receiver's memory is free when MessageRing::ready has this count; 0: it is
};

/// Lies in pages that both processes map. Of the two ends, who comes first to a message decides for
/// both how its bytes move, so no end ever waits for the other's host, and each knows, when it
/// enqueues its part, what the other does.
class MessageRing {
 public:
  static constexpr uint64_t kEntries = 1024;  // how far one host may run ahead of the other
  static constexpr uint32_t kMaxBlocks = 256;
  static constexpr uint64_t kBounceSlots = 2;
  static constexpr int64_t kBounceSlotBytes = int64_t{8} << 20;

  enum class Side : uint8_t { kReceiver, kSender };
  enum class Protocol : uint8_t {
    kPosted,   // the receiver came first: the sender writes into its memory
    kOffered,  // the sender came first: the receiver reads from its memory
    kBounced,  // who came first had no memory: through a few slots of the receiver's, which copies
               // from there
    kTooFar,   // nothing is decided: the other end has still to get to message `number - kEntries`
  };
  struct Outcome {
    Protocol protocol = Protocol::kTooFar;
    Proposal decided;             // of the end that came first
    uint64_t bytes_of_other = 0;  // 0: it has not come yet
  };

  MessageRing();

  /// Decides on message `number`. Each end calls it once for each, in their order, from one thread
  /// at a time; again after kTooFar.
  Outcome match(uint64_t number, Side side, const Proposal& mine);

  struct Block {
    uint64_t bytes = 0;
    MemoryHandle handle{};
  };
  using Blocks = std::array<Block, kMaxBlocks>;
  /// Exported by each side; an entry is written before it is proposed. The receiver's first one has
  /// the bounce slots.
  Blocks& blocks_of(Side side) { return blocks_[static_cast<size_t>(side)]; }
  /// Whether an end has failed: it holds up or has released waits.
  bool is_overridden() const { return arrived.is_overridden() || freed.is_overridden(); }
  /// Whether the other side has mapped blocks of `side`, which must then not be freed.
  std::atomic<bool>& is_mapped(Side side) { return is_mapped_[static_cast<size_t>(side)]; }

  Flag arrived;  // grains that are there: written by the sender's device
  Flag freed;    // bounce slots that were copied from: written by the receiver's
  Flag ready;    // postings whose memory became free: written by the receiver's
  Flag taken;    // offers that were copied: written by the receiver's

 private:
  struct Entry {
    std::atomic<uint64_t> state{0};
    std::array<Proposal, 2> proposals;
  };

  std::array<Entry, kEntries> entries_;
  std::array<Blocks, 2> blocks_;
  std::array<std::atomic<bool>, 2> is_mapped_{};
};

}  // namespace ldt
