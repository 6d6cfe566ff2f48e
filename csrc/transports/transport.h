// What moves the payload of a stream lane: the interface that stream lanes are written against.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <vector>

#include "common/event.h"
#include "common/streams.h"
#include "memory/message_tensors.h"
#include "memory/receive_pool.h"

namespace ldt {

/// When a receive ends.
struct ReceiveEvents {
  // The tensors have the data; null: what stands for them has it in stream order.
  std::shared_ptr<const Event> received;
  std::shared_ptr<const Event> read;  // other processes have read it from here; null: none does
};

/// Enqueues on `stream`, which is current, or on streams ordered after it; waits for no transfer,
/// unless the transport says so.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Returns the event after which the tensors may be overwritten; null: in stream order.
  virtual std::shared_ptr<const Event> send(const c10::Stream& stream,
                                            const MessageTensors& message, int peer) = 0;
  /// Receives from `peer`, on a member from the stage. With `broadcasts`, forwards inside the stage
  /// while it receives. `claims` has one entry per tensor of the message.
  virtual ReceiveEvents receive(const c10::Stream& stream, const MessageTensors& message,
                                const std::vector<ReceivePool::Claim>& claims, int peer,
                                bool broadcasts) = 0;
  /// An upper bound of the operations enqueued so far, on any stream.
  virtual int64_t enqueued() const = 0;
  /// Admits no further call that the abort of a communicator could disturb, and waits a bounded
  /// time for a running one.
  virtual void shutdown() {}
  /// Ends transfers in flight, as far as possible. The transport is unusable afterwards.
  virtual void abort() = 0;
  /// Called when the lane is closed and nothing is in flight: another lane may take its stream.
  virtual void release() {}
  /// The stream for the lane.
  virtual c10::Stream stream(c10::Device device) { return new_lane_stream(device); }
  /// Allocates memory for the lane's receive pool; null: torch's allocator serves as well.
  virtual ReceivePool::Allocate allocator() { return nullptr; }
  /// The number of tensors received with an extra copy, as the sender's host came first.
  virtual int64_t bounced() const { return 0; }
  /// Why nothing moves any more, where no work tells; empty if it does.
  virtual std::string failure() const { return {}; }
  /// Whether the backend itself times transfers out.
  virtual bool has_own_timeout() const = 0;
};

}  // namespace ldt
