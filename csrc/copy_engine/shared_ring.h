// What both ends of a route have: the ledger in shared pages, a device that knows them, and
// timeout.
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
CopyEngine& require_copy_engine(c10::Device device);

/// A ledger in this process's address space. The pages stay until no stream waits for a flag in
/// them: who has waited for a message may be far behind the lane that is closed.
class SharedRing {
 public:
  /// A new one.
  explicit SharedRing(c10::Device device);
  /// That of the other end.
  SharedRing(c10::Device device, const std::string& ticket);
  ~SharedRing();
  SharedRing(const SharedRing&) = delete;
  SharedRing& operator=(const SharedRing&) = delete;

  MessageRing& operator*() const { return *ring_; }
  MessageRing* operator->() const { return ring_; }
  const std::string& ticket() const { return pages_->shared.ticket(); }
  /// Something that is enqueued on `stream` waits for a flag or writes one.
  void note_user(const c10::Stream& stream);
  /// Whether what such streams have now is done, whenever it is asked.
  std::function<bool()> enqueued_is_done();

 private:
  struct Pages {
    template <typename Source>
    Pages(c10::Device device, const Source& source) : device(device), shared(source) {}
    ~Pages();

    const c10::Device device;
    SharedMemory shared;
    bool is_registered = false;
  };

  void register_host();

  const std::shared_ptr<Pages> pages_;
  MessageRing* ring_;
  std::mutex mutex_;
  std::vector<c10::Stream> users_;
};

/// Decides on message `number` (MessageRing::meet), when the other end is no longer a whole ledger
/// behind. Throws LaneError if that takes longer than `timeout`, or if the two ends have different
/// bytes.
MessageRing::Outcome match_message(const SharedRing& ring, uint64_t number, MessageRing::Side side,
                                   const Proposal& mine, std::chrono::milliseconds timeout);

}  // namespace ldt
