// What both ends of a route have: the ledger in shared pages, a device that knows them, and
// patience.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/error.h"
#include "copy_engine/copy_engine.h"
#include "copy_engine/shared_memory.h"

namespace ldt {

/// At most, for each piece that moves: a wait, a copy, a flag.
constexpr int64_t kOperationsOfPiece = 3;

/// The peer device of `device`. Throws LaneError saying why there is none.
PeerDevice& require_peer_device(c10::Device device);

/// A ledger in this process's address space. The pages stay until no stream waits for a flag in
/// them: who has waited for a message may be far behind the lane that is closed.
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
  const std::string& ticket() const { return pages_->shared.ticket(); }
  /// Something that is enqueued on `stream` waits for a flag or writes one.
  void note_use(const c10::Stream& stream);
  /// Whether what such streams have now is done, whenever it is asked.
  std::function<bool()> enqueued_is_done();

 private:
  struct Pages {
    template <typename Source>
    Pages(c10::Device device, const Source& source) : device(device), shared(source) {}
    ~Pages();

    const c10::Device device;
    SharedPages shared;
    bool is_enlisted = false;
  };

  void enlist();

  const std::shared_ptr<Pages> pages_;
  Ledger* ledger_;
  std::mutex mutex_;
  std::vector<c10::Stream> users_;
};

/// Decides on message `number` (Ledger::meet), when the other end is no longer a whole ledger
/// behind. Throws LaneError if that takes longer than `patience`, or if the two ends have different
/// bytes.
Ledger::Outcome meet_in(const SharedLedger& ledger, uint64_t number, Ledger::Side side,
                        const Proposal& mine, std::chrono::milliseconds patience);

}  // namespace ldt
