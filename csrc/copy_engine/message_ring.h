// Agrees, message by message, on how the bytes move between two processes.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace ldt {

/// An IPC handle of device memory: opaque bytes, with which another process maps it.
using MemoryHandle = std::array<unsigned char, 64>;

/// A word that devices wait for and write. The lower half is a count that the other end's device,
/// or a thread of this host, writes. Waits compare the whole word as a signed number, so setting
/// the upper half overrides all of them, whatever count is written later. The end that writes the
/// count may wait for it, too: for the lower half only, which a failure does not hold up.
struct alignas(128) Flag {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> upper{0};

  /// What a device waits for, seen from the host.
  bool has_reached(uint64_t wanted) const {
    const auto word = uint64_t{upper.load()} << 32 | count.load();
    return static_cast<int64_t>(word - wanted) >= 0;
  }
  /// The count only, whatever the upper half is. Counts wrap around at 2^32.
  bool has_counted(uint64_t wanted) const {
    return static_cast<int32_t>(count.load() - static_cast<uint32_t>(wanted)) >= 0;
  }
  /// Counts on the host, for a flag that no device writes. Sets the lower half first, so that no
  /// wait ends early when it goes around.
  void count_to(uint64_t reached) {
    count.store(static_cast<uint32_t>(reached));
    const auto around = static_cast<uint32_t>(reached >> 32);
    auto before = around - 1;
    if (around != 0) upper.compare_exchange_strong(before, around);  // not if it was overridden
  }
  bool is_overridden() const { return upper.load() >= kReleased; }
  /// Ends all waits, now and later.
  void release() { upper.store(kReleased); }
  /// Blocks all waits until the flag is released; does nothing once it was.
  void hold() {
    uint32_t now = upper.load();
    while (now != kReleased && !upper.compare_exchange_weak(now, kHeld)) {
    }
  }

 private:
  // Far from values at which a difference to a count would wrap around.
  static constexpr uint32_t kReleased = uint32_t{1} << 30;
  static constexpr uint32_t kHeld = uint32_t{3} << 30;
};
static_assert(std::endian::native == std::endian::little && sizeof(Flag) == 128);

/// What one end offers for a message. With memory: `offset` in a block that it exported.
struct Proposal {
  uint64_t bytes = 0;
  uint64_t piece_bytes = 0;  // `arrived` counts one per piece, the last of which may be shorter
  bool has_memory = false;
  uint32_t block = 0;
  uint64_t offset = 0;
  uint64_t ready = 0;  // the receiver's memory is free at this count of MessageRing::ready; 0: now
};

/// Lives in pages that both processes map. The end that reaches a message first decides for both
/// how its bytes move. So no end ever waits for the other's host, and each knows what the other
/// does when it enqueues its part.
class MessageRing {
 public:
  static constexpr uint64_t kEntries = 1024;  // messages that one host may run ahead of the other
  static constexpr uint32_t kMaxBlocks = 256;
  static constexpr uint64_t kBounceSlots = 2;
  static constexpr int64_t kBounceSlotBytes = int64_t{8} << 20;

  enum class Side : uint8_t { kReceiver, kSender };
  enum class Protocol : uint8_t {
    kPosted,   // the receiver came first: the sender writes to its memory
    kOffered,  // the sender came first: the receiver reads from its memory
    kBounced,  // the first end had no exported memory: by way of the receiver's bounce slots
    kTooFar,   // undecided: the other end has not reached message `number - kEntries` yet
  };
  struct Outcome {
    Protocol protocol = Protocol::kTooFar;
    Proposal decided;             // by the end that came first
    uint64_t bytes_of_other = 0;  // 0: it has not reached the message yet
  };

  MessageRing();

  /// Matches message `number` with the other end's. Each end calls it once per message, in order,
  /// from one thread at a time, and again after kTooFar.
  Outcome match(uint64_t number, Side side, const Proposal& mine);

  struct Block {
    uint64_t bytes = 0;
    MemoryHandle handle{};
  };
  using Blocks = std::array<Block, kMaxBlocks>;
  /// The memory that each side exports; an entry is written before it is proposed. The receiver's
  /// first block has the bounce slots.
  Blocks& blocks_of(Side side) { return blocks_[static_cast<size_t>(side)]; }
  /// Whether an end has failed and overrides waits.
  bool has_failed() const { return arrived.is_overridden() || freed.is_overridden(); }
  /// Whether the other side has mapped blocks of `side`. These must not be freed.
  std::atomic<bool>& is_mapped(Side side) { return is_mapped_[static_cast<size_t>(side)]; }

  Flag arrived;  // pieces that have arrived; the sender's device writes it
  Flag freed;    // bounce slots that are free again; the receiver's device writes it
  Flag ready;    // posted receives whose memory is free; the receiver's device writes it
  Flag taken;    // offered messages that were read; the receiver's device writes it

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
