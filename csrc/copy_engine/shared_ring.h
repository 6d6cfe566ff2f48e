// A message ring in shared memory that the device can access, and the matching of messages in it.
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

/// Per piece at most a wait, a copy and a flag.
constexpr int64_t kOperationsOfPiece = 3;

/// A ring in this process's address space. The pages stay until no stream waits for a flag in them:
/// a stream that waits for a message may lag far behind the lane's close().
class SharedRing {
 public:
  /// Creates a ring.
  explicit SharedRing(c10::Device device);
  /// Opens the other end's ring.
  SharedRing(c10::Device device, const std::string& handle);
  ~SharedRing();
  SharedRing(const SharedRing&) = delete;
  SharedRing& operator=(const SharedRing&) = delete;

  MessageRing& operator*() const { return *ring_; }
  MessageRing* operator->() const { return ring_; }
  const std::string& handle() const { return pages_->shared.handle(); }
  /// Notes that `stream` waits for a flag or writes one.
  void note_user(const c10::Stream& stream);
  /// Returns a query: whether all that is enqueued on such streams now is done.
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

/// Matches message `number` (MessageRing::match), waiting while the other end is a whole ring
/// behind. Throws LaneError if that takes longer than `timeout` or if the two ends differ in size.
MessageRing::Outcome match_message(const SharedRing& ring, uint64_t number, MessageRing::Side side,
                                   const Proposal& mine, std::chrono::milliseconds timeout);

}  // namespace ldt
