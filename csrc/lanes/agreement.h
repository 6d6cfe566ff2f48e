// Both ends of a message and all ranks of the receiving stage agree on its contents before it
// moves.
#pragma once

#include <functional>
#include <string>

#include "common/error.h"
#include "lanes/announcement.h"
#include "process_group/group_comm.h"

namespace ldt {

/// The two ends differ. Every rank concerned throws it and has moved the same messages, so the lane
/// remains usable.
class MismatchError : public LaneError {
  using LaneError::LaneError;
};

/// Throws MismatchError with what both ends have; `whose` is e.g. "the sender has".
[[noreturn]] void throw_mismatch(const std::string& name, const Announcement& own,
                                 const Announcement& theirs, const char* whose);
/// Throws MismatchError on a rank that agrees while another rank of its stage does not.
[[noreturn]] void throw_disagreement(const std::string& name, const Announcement& own);

/// The agreement inside the receiving stage. `wait` waits for a collective the way the lane does.
class StageAgreement {
 public:
  using Wait = std::function<void(const GroupComm::Work&)>;
  StageAgreement(GroupComm& comm, c10::Device device, Wait wait)
      : comm_(comm), device_(device), wait_(std::move(wait)) {}

  /// On the leader: broadcasts the sender's announcement and returns whether all ranks of the stage
  /// expect it. True without asking if sender and leader differ already.
  bool lead(const Announcement& own, const Announcement& theirs);
  /// On a member: throws MismatchError unless the sender and the whole stage agree.
  void follow(const std::string& name, const Announcement& own);

 private:
  bool anyone_objects(bool we_do);

  GroupComm& comm_;
  c10::Device device_;
  Wait wait_;
};

}  // namespace ldt
