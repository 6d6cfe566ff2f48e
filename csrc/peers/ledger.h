// Where the two ends of an edge write down, message by message, where its bytes go.
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
/// decides over them all, whatever count is written after that.
struct alignas(128) Flag {
  uint32_t count = 0;  // the host never looks
  std::atomic<uint32_t> upper{0};

  /// All waits end, for good.
  void release() { upper.store(kReleased); }
  /// No wait ends any more, unless the flag was or will be released.
  void hold() {
    uint32_t counted = upper.load();
    while (counted != kReleased && !upper.compare_exchange_weak(counted, kHeld)) {
    }
  }

 private:
  // Far from where differences to a count would wrap around.
  static constexpr uint32_t kReleased = uint32_t{1} << 30;
  static constexpr uint32_t kHeld = uint32_t{3} << 30;
};
static_assert(std::endian::native == std::endian::little && sizeof(Flag) == 128);

/// Where the receiver wants a message: `offset` into an exported block.
struct Posting {
  uint64_t bytes = 0;
  uint64_t offset = 0;
  uint64_t grain = 0;  // `arrived` counts once for so many bytes, and once for the rest
  uint64_t ready = 0;  // the memory is free when Ledger::ready has this count; 0: it is free
  uint32_t block = 0;
};

/// Lies in pages that both processes map. Of the two ends, who comes first to a message decides for
/// both: the receiver that it has posted memory for it, which the sender then writes to, or the
/// sender that it bounces: it goes through a few slots of the receiver's, which copies it from
/// there. So no end ever waits for the other's host, and each end knows, when it enqueues its part,
/// what the other does.
///
/// Methods named `sender_` and `receiver_` are called by that end's one thread.
class Ledger {
 public:
  static constexpr uint64_t kEntries = 1024;  // how far one end's host may run ahead of the other's
  static constexpr uint32_t kMaxBlocks = 256;
  static constexpr uint64_t kBounceSlots = 2;
  static constexpr int64_t kBounceSlotBytes = int64_t{4} << 20;

  enum class Course { kPosted, kBounced, kTooFar };
  /// What became of a message, and how many bytes the other end has in it if that came first; else
  /// 0.
  struct Outcome {
    Course course;
    uint64_t bytes_of_other = 0;
  };

  Ledger();

  /// Message `number` goes to `posting` unless it bounces already. kTooFar: the other end has still
  /// to get to message `number - kEntries`; try again.
  Outcome receiver_post(uint64_t number, const Posting& posting);
  /// It bounces, as there is no memory to post.
  Outcome receiver_bounce(uint64_t number, uint64_t bytes);
  /// kPosted fills `posting`.
  Outcome sender_take(uint64_t number, uint64_t bytes, Posting& posting);

  struct Block {
    uint64_t bytes = 0;
    MemoryHandle handle{};
  };
  std::array<Block, kMaxBlocks>
      blocks;  // the first has the bounce slots; written before they are posted
  std::atomic<bool> is_mapped{false};  // the sender has mapped blocks, which must not be freed

  Flag arrived;  // pieces that are there: written by the sender's device
  Flag freed;    // bounce slots that were copied from: written by the receiver's
  Flag ready;    // postings whose memory became free: written by the receiver's

 private:
  struct Entry {
    std::atomic<uint64_t> state{0};
    uint64_t sender_bytes = 0;  // of the end that came first
    Posting posting;
  };

  /// Tries to be the first at message `number`; false if the other end was, or is not there yet.
  bool come_first(Entry& entry, uint64_t number, uint64_t verdict);
  Outcome receive(uint64_t number, const Posting& posting, uint64_t verdict);

  std::array<Entry, kEntries> entries_;
};

}  // namespace ldt
