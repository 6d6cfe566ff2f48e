// The receiving end of an edge: another process writes into this one's memory.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "peers/edge.h"
#include "peers/peer_memory.h"

namespace ldt {

/// Messages come in the order of begin(); every step is enqueued on the stream that is given.
class PeerReceiver {
 public:
  /// Throws LaneError if this device cannot.
  explicit PeerReceiver(std::shared_ptr<PeerMemory> memory);
  ~PeerReceiver();

  /// For the PeerSender of the other end: text of one line.
  std::string offer() const;

  struct Target {
    char* address = nullptr;
    int64_t bytes = 0;
    bool is_free =
        false;  // no work is queued that uses the memory; else the stream waits for it already
    bool may_post = false;  // of a pool that nobody else uses: the sender may write at any time
  };
  /// The next message, of one tensor. Pieces of `grain` bytes can be awaited one by one.
  void begin(const c10::Stream& stream, const Target& target, int64_t grain,
             std::chrono::milliseconds patience);
  /// What is enqueued after this finds the next `bytes` of the message in its target.
  void await(const c10::Stream& stream, int64_t bytes);

  /// Ends all waits of this end, for good, and none of the other's any more: what comes after a
  /// failure is not to be used.
  void abort();

 private:
  std::optional<uint32_t> number_of(size_t block);
  void await_posted(const c10::Stream& stream, int64_t bytes);
  void await_bounced(const c10::Stream& stream, int64_t bytes);

  std::shared_ptr<PeerMemory> memory_;
  PeerDevice& driver_;
  std::shared_ptr<SharedLedger> ledger_;
  at::Tensor bounce_;           // the slots
  std::vector<size_t> listed_;  // blocks of memory_ in the order of the ledger's table

  uint64_t number_ = 0;   // of the next message
  uint64_t arrived_ = 0;  // what Ledger::arrived was awaited for, or will be by this message's end
  uint64_t freed_ = 0;
  uint64_t readied_ = 0;

  struct Message {
    Target target;
    bool is_posted = false;
    int64_t grain = 0;
    int64_t done = 0;             // bytes that are in place
    uint64_t arrived_before = 0;  // the count when it began
  } now_;
};

}  // namespace ldt
