// How the bytes of a lane move: the interface that lanes are written against.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ldt {

/// Moves byte tensors between leaders, and from the receiving leader to the rest of its stage.
///
/// Every call starts its transfer and returns. Messages of one direction between two peers with the
/// same tag match in the order of the calls, and so do broadcasts. The returned work is waited on
/// exactly once (gloo's point-to-point works allow no more); the tensor must live until then.
class GroupComm {
 public:
  /// What the sender tells the receiver, what the receiver tells the sender: crossing messages must
  /// not meet.
  enum Tag : int { kPayload = 0, kAnnouncement = 1, kExpectation = 2 };
  using Work = c10::intrusive_ptr<c10d::Work>;

  virtual ~GroupComm() = default;
  virtual Work send(const at::Tensor& bytes, int peer, Tag tag) = 0;
  virtual Work receive(const at::Tensor& bytes, int peer, Tag tag) = 0;
  /// From the stage's root to its other ranks.
  virtual Work broadcast(const at::Tensor& bytes) = 0;
  /// The largest value over the stage's ranks, in place; one int32.
  virtual Work maximum(const at::Tensor& value) = 0;

  /// Ends what is under way on a device, as far as the backend can. The transport is of no
  /// use after.
  virtual void abort() = 0;

  /// Whether this rank talks to other nodes (a leader) or only hears the broadcast (a member).
  virtual bool is_leader() const = 0;
  /// Whether what arrives here has to be broadcast inside the stage.
  virtual bool has_stage() const = 0;
  /// The number of ranks that `peer` may name.
  virtual int num_peers() const = 0;
  /// This rank's own number among them.
  virtual int own_peer() const = 0;
};

}  // namespace ldt
