// Two c10d process groups of any backend.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "process_group/group_comm.h"

namespace ldt {

/// `point_to_point` connects leaders and is null on members. `stage` is the receiving stage's
/// broadcast group, null for a stage of one rank and on senders; `stage_root` is the leader's group
/// rank in it. The groups must be the lane's own: issue nothing else on them.
class C10dGroupComm final : public GroupComm {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  C10dGroupComm(Group point_to_point, Group stage, int stage_root);

  Work send(const at::Tensor& bytes, int peer) override;
  Work receive(const at::Tensor& bytes, int peer) override;
  Work broadcast(const at::Tensor& bytes) override;
  void abort() override;
  bool is_leader() const override { return is_leader_; }
  bool has_stage() const override { return has_stage_; }
  int num_peers() const override { return num_peers_; }
  int own_peer() const override { return own_peer_; }

 private:
  // Asked once: asking again would need a live backend.
  Group point_to_point_;
  Group stage_;
  int stage_root_;
  bool is_leader_;
  bool has_stage_;
  int num_peers_ = 0;
  int own_peer_ = -1;
};

}  // namespace ldt
