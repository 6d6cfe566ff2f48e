// What both ends of an edge have: the ledger in shared pages, a device that knows them, and
// patience.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/end.h"
#include "common/error.h"
#include "peers/peer_device.h"
#include "peers/shared_pages.h"

namespace ldt {

/// The peer device of `device`. Throws LaneError saying why there is none.
PeerDevice& require_peer_device(c10::Device device);

/// A ledger in this process's address space. It stays there until no stream can come to its flags
/// any more.
class SharedLedger {
 public:
  /// A new one.
  static std::shared_ptr<SharedLedger> create(c10::Device device);
  /// That of the other end.
  static std::shared_ptr<SharedLedger> open(c10::Device device, const std::string& ticket);
  ~SharedLedger();
  SharedLedger(const SharedLedger&) = delete;
  SharedLedger& operator=(const SharedLedger&) = delete;

  Ledger& operator*() const { return *ledger_; }
  Ledger* operator->() const { return ledger_; }
  const std::string& ticket() const { return pages_->ticket(); }

  /// Something is about to be enqueued on `stream` that waits for a flag, writes one, or uses
  /// memory of the edge.
  void note_use(const c10::Stream& stream);
  /// The ends of all that is enqueued so far on streams that were noted.
  std::vector<std::shared_ptr<const End>> ends_of_use() const;

 private:
  SharedLedger(c10::Device device, std::unique_ptr<SharedPages> pages);
  static std::shared_ptr<SharedLedger> kept_until_unused(SharedLedger* ledger);

  const c10::Device device_;
  const std::unique_ptr<SharedPages> pages_;
  Ledger* ledger_;
  mutable std::mutex mutex_;
  std::vector<c10::Stream> users_;
};

/// Decides on message `number` (Ledger::meet), when the other end is no longer a whole ledger
/// behind. Throws LaneError if that takes longer than `patience`, or if the two ends have different
/// bytes.
Ledger::Outcome meet_in(const SharedLedger& ledger, uint64_t number, Ledger::Side side,
                        const Proposal& mine, std::chrono::milliseconds patience);

}  // namespace ldt
