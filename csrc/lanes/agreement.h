// Both ends of a message, and all ranks of the receiving stage, agree on what it holds before it
// moves.
#pragma once

#include <functional>
#include <string>

#include "common/error.h"
#include "lanes/announcement.h"
#include "process_group/group_comm.h"

namespace ldt {

/// The two sides differ. Every rank concerned throws it and has moved the same messages, so the
/// lane goes on.
class MismatchError : public LaneError {
  using LaneError::LaneError;
};

/// Throws MismatchError with both sides' figures; `whose` is e.g. "the sender has".
[[noreturn]] void throw_mismatch(const std::string& name, const Announcement& own,
                                 const Announcement& theirs, const char* whose);
/// Throws MismatchError on a rank that was right while another of its stage was not.
[[noreturn]] void throw_disagreement(const std::string& name, const Announcement& own);

/// The receiving stage's part. `wait` waits for a collective, as the lane does.
class StageAgreement {
 public:
  using Wait = std::function<void(const GroupComm::Work&)>;
  StageAgreement(GroupComm& comm, c10::Device device, Wait wait)
      : comm_(comm), device_(device), wait_(std::move(wait)) {}

  /// On the leader: passes on what the sender announced, and whether all ranks of the stage expect
  /// that. Without agreement between sender and leader there is nothing to ask: true.
  bool lead(const Announcement& own, const Announcement& theirs);
  /// On a member: throws MismatchError unless sender, leader and all members agree.
  void follow(const std::string& name, const Announcement& own);

 private:
  bool anyone_objects(bool we_do);

  GroupComm& comm_;
  c10::Device device_;
  Wait wait_;
};

}  // namespace ldt
