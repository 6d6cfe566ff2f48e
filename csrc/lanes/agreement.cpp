// One broadcast of the announcement, and one all-reduce of objections.
#include "lanes/agreement.h"

namespace ldt {

void throw_mismatch(const std::string& name, const Announcement& own, const Announcement& theirs,
                    const char* whose) {
  const auto pieces =
      own.chunk_bytes == theirs.chunk_bytes
          ? std::string()
          : c10::str(" (chunk_bytes: ", own.chunk_bytes, " here, ", theirs.chunk_bytes, " there)");
  throw MismatchError(
      {__func__, __FILE__, __LINE__},
      c10::str(name, ": the two sides differ: here ", own.to_string(), ", ", whose, " ",
               theirs.to_string(), pieces, ". Nothing was delivered; make both sides agree"));
}

void throw_disagreement(const std::string& name, const Announcement& own) {
  throw MismatchError({__func__, __FILE__, __LINE__},
                      c10::str(name, ": another rank of this stage expects something else than ",
                               own.to_string(), "; its own error says what"));
}

bool StageAgreement::anyone_objects(bool we_do) {
  const auto objections =
      at::full({1}, we_do ? 1 : 0, at::TensorOptions().dtype(at::kInt).device(device_));
  wait_(in_stage([&] { return comm_.maximum(objections); }));
  return objections.item<int>() != 0;
}

bool StageAgreement::lead(const Announcement& own, const Announcement& theirs) {
  auto answer = theirs;
  answer.matches_leader = own.matches(theirs);
  const auto encoded = answer.encode().to(device_);
  wait_(in_stage([&] { return comm_.broadcast(encoded); }));
  return !answer.matches_leader || !anyone_objects(false);
}

void StageAgreement::follow(const std::string& name, const Announcement& own) {
  const auto encoded =
      at::empty({Announcement::kBytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  wait_(in_stage([&] { return comm_.broadcast(encoded); }));
  const auto theirs = Announcement::decode(encoded.cpu());
  const bool fits = own.matches(theirs);
  if (!theirs.matches_leader) {
    throw_mismatch(name, own, theirs, "unlike this stage's leader, the sender has");
  }
  const bool objections = anyone_objects(!fits);
  if (!fits) throw_mismatch(name, own, theirs, "the sender and this stage's leader have");
  if (objections) throw_disagreement(name, own);
}

}  // namespace ldt
