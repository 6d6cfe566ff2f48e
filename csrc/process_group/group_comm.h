// The process groups of a lane: the interface that lanes are written against.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ldt {

/// Sends byte tensors between leaders and broadcasts them from a receiving leader to its stage.
///
/// Every call starts its transfer and returns. Sends and receives of two peers match in call order,
/// and so do broadcasts. Wait for the returned work exactly once (gloo's
/// point-to-point works allow no more), and keep the tensor alive until then.
class GroupComm {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  virtual ~GroupComm() = default;
  virtual Work send(const at::Tensor& bytes, int peer) = 0;
  virtual Work receive(const at::Tensor& bytes, int peer) = 0;
  /// From the stage's root to its other ranks.
  virtual Work broadcast(const at::Tensor& bytes) = 0;

  /// Aborts transfers on a device, as far as the backend can. The object is unusable afterwards.
  virtual void abort() = 0;

  /// Whether this rank is a leader, which talks to other nodes, or a member, which only joins the
  /// broadcast.
  virtual bool is_leader() const = 0;
  /// Whether messages are broadcast inside the stage.
  virtual bool has_stage() const = 0;
  /// The size of the point-to-point group.
  virtual int num_peers() const = 0;
  /// This rank in it.
  virtual int own_peer() const = 0;
};

}  // namespace ldt
