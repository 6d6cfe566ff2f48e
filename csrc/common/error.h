// The exception type of lanes and works, and how to throw it.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace ldt {

/// A lane or a work failed. Python sees it as `ldt._C.LaneError`, a
/// `torch.distributed.DistBackendError`.
class LaneError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// The failure is inside the receiving stage, not between its leader and the sender.
class StageError : public LaneError {
  using LaneError::LaneError;
};

/// Throws LaneError with the concatenated arguments as its text.
template <typename... Args>
[[noreturn]] void throw_lane_error(const Args&... args) {
  throw LaneError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str(args...));
}

/// The message of an exception, without the C++ backtrace that c10 may append.
std::string text_of(const std::exception_ptr& error);

/// Runs `step`, a call into the stage's group, and turns what the backend throws into a StageError.
template <typename Step>
auto in_stage(const Step& step) {
  try {
    return step();
  } catch (const LaneError&) {
    throw;
  } catch (...) {
    throw StageError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                     text_of(std::current_exception()));
  }
}

}  // namespace ldt
