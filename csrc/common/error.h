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

/// Throws LaneError with the concatenated arguments as its text.
template <typename... Args>
[[noreturn]] void throw_lane_error(const Args&... args) {
  throw LaneError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str(args...));
}

/// The plain text of an exception, without the C++ backtrace that c10 may append.
std::string text_of(const std::exception_ptr& error);

}  // namespace ldt
