// Calls into c10d. Nothing here waits.
//
// They are hidden from torch.profiler. A work that is launched while it records has a range, which
// ends when the work does: after a receive that was posted ahead, in another recording, or in none.
// There it would write to memory of the first one, which is freed.
#include "process_group/c10d_group_comm.h"

#include <ATen/record_function.h>

#include "common/error.h"

namespace ldt {
namespace {

constexpr int kTag = 0;  // the groups are the lane's own

}  // namespace

C10dGroupComm::C10dGroupComm(Group point_to_point, Group stage, int stage_root)
    : point_to_point_(std::move(point_to_point)),
      stage_(std::move(stage)),
      stage_root_(stage_root) {
  has_stage_ = stage_ && stage_->getSize() > 1;
  if (!point_to_point_ && !has_stage_) {
    throw_lane_error(
        "a lane needs a point-to-point group, a stage group of two or more ranks, or both; got "
        "neither");
  }
  if (has_stage_ && (stage_root < 0 || stage_root >= stage_->getSize())) {
    throw_lane_error("stage_root: expected a rank of the stage group, 0 to ", stage_->getSize() - 1,
                     ", got ", stage_root);
  }
  is_leader_ = static_cast<bool>(point_to_point_);
  if (is_leader_ && has_stage_ && stage_->getRank() != stage_root) {
    throw_lane_error("stage_root is ", stage_root, ", but this rank of the stage group, ",
                     stage_->getRank(),
                     ", has the point-to-point group: give that to the root only");
  }
  if (is_leader_) {
    num_peers_ = point_to_point_->getSize();
    own_peer_ = point_to_point_->getRank();
  }
}

GroupComm::Work C10dGroupComm::send(const at::Tensor& bytes, int peer) {
  std::vector<at::Tensor> tensors{bytes};
  const at::DisableRecordFunctionGuard hidden;
  return point_to_point_->send(tensors, peer, kTag);
}

GroupComm::Work C10dGroupComm::receive(const at::Tensor& bytes, int peer) {
  std::vector<at::Tensor> tensors{bytes};
  const at::DisableRecordFunctionGuard hidden;
  return point_to_point_->recv(tensors, peer, kTag);
}

GroupComm::Work C10dGroupComm::broadcast(const at::Tensor& bytes) {
  std::vector<at::Tensor> tensors{bytes};
  c10d::BroadcastOptions options;
  options.rootRank = stage_root_;
  const at::DisableRecordFunctionGuard hidden;
  return stage_->broadcast(tensors, options);
}

void C10dGroupComm::abort() {
  for (const auto& group : {point_to_point_, stage_}) {
    if (!group) continue;
    try {
      group->abort();
    } catch (...) {  // abort the other group all the same
      TORCH_WARN("a process group could not be aborted: ", text_of(std::current_exception()));
    }
  }
}

}  // namespace ldt
