// How the payload of a stream lane moves: the interface that stream lanes are written against.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "common/event.h"
#include "common/streams.h"
#include "memory/message_tensors.h"
#include "memory/receive_pool.h"

namespace ldt {

/// When a receive is over.
struct ReceiveEvents {
  std::shared_ptr<const Event>
      data;  // what was received is there; empty: in the order of the stream
  std::shared_ptr<const Event> reading;  // another process has read it from here; empty: none does
};

/// What has to be enqueued is on `stream`, which is the current one, or in an order with it: what
/// is on it before happens before. Nothing waits on the host.
class Transport {
 public:
  virtual ~Transport() = default;

  /// Returns when the tensors may be overwritten; empty: in the order of the stream.
  virtual std::shared_ptr<const Event> send(const c10::Stream& stream,
                                            const MessageTensors& message, int peer) = 0;
  /// Receives from `peer` (on a member: from the stage) and, with `broadcasts`, passes on inside
  /// the stage while it receives. `claims` has one for each tensor of the message.
  virtual ReceiveEvents receive(const c10::Stream& stream, const MessageTensors& message,
                                const std::vector<ReceivePool::Claim>& claims, int peer,
                                bool broadcasts) = 0;
  /// How many operations it has enqueued so far, on any stream, or some more.
  virtual int64_t enqueued() const = 0;
  /// Begins no call any more that the end of a communicator would disturb. Waits for one that is
  /// under way, but not for ever.
  virtual void shutdown() {}
  /// Ends what is under way, as far as that can be. Of no use after.
  virtual void abort() = 0;
  /// The stream that the lane is to use.
  virtual c10::Stream stream(c10::Device device) { return new_lane_stream(device); }
  /// Memory for the lane's receive pool that this transport serves best; by default any of the
  /// device.
  virtual ReceivePool::Allocate allocator() { return nullptr; }
  /// How many of the tensors received so far were copied once more, as the sender came first.
  virtual int64_t bounced() const { return 0; }
  /// Whether something else ends a transfer that takes too long.
  virtual bool has_own_timeout() const = 0;
};

}  // namespace ldt
