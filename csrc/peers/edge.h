// What both ends of an edge have: the ledger in shared pages, a device that knows them, and
// patience.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "common/error.h"
#include "peers/peer_device.h"
#include "peers/shared_pages.h"

namespace ldt {

/// The peer device of `device`. Throws LaneError saying why there is none.
PeerDevice& require_peer_device(c10::Device device);

/// A ledger in this process's address space.
class SharedLedger {
 public:
  /// A new one.
  explicit SharedLedger(c10::Device device);
  /// That of the other end.
  SharedLedger(c10::Device device, const std::string& ticket);
  ~SharedLedger();
  SharedLedger(const SharedLedger&) = delete;
  SharedLedger& operator=(const SharedLedger&) = delete;

  Ledger& operator*() const { return *ledger_; }
  Ledger* operator->() const { return ledger_; }
  const std::string& ticket() const { return pages_.ticket(); }

 private:
  const c10::Device device_;
  SharedPages pages_;
  Ledger* ledger_;
};

/// Decides on message `number` (Ledger::meet), when the other end is no longer a whole ledger
/// behind. Throws LaneError if that takes longer than `patience`, or if the two ends have different
/// bytes.
Ledger::Outcome meet_in(const SharedLedger& ledger, uint64_t number, Ledger::Side side,
                        const Proposal& mine, std::chrono::milliseconds patience);

}  // namespace ldt
