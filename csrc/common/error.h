// The one exception type of lanes and works, and how it is thrown.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace ldt {

/// A lane or a work failed. Bound to Python as `ldt._C.LaneError`, a
/// `torch.distributed.DistBackendError`.
class LaneError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

/// It failed inside the receiving stage, and not between the stage's leader and the sender.
class StageError : public LaneError {
  using LaneError::LaneError;
};

/// Throws LaneError with the concatenated arguments as its text.
template <typename... Args>
[[noreturn]] void throw_lane_error(const Args&... args) {
  throw LaneError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str(args...));
}

/// The plain text of an exception, without the C++ backtrace that c10 may append.
std::string text_of(const std::exception_ptr& error);

/// Runs `step`, a call to the stage's group. What the backend throws becomes a StageError.
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
