// Times that people give: refused where they make no sense, cut where no clock could count them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "common/error.h"

namespace ldt {

/// As good as forever, and still a time that may be added to any clock's now: those count
/// nanoseconds in 63 bits, which is 292 years.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365 * 100);

/// At most kLongestTimeout. Throws LaneError for a negative one; `what` begins its text.
inline std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout,
                                                 const std::string& what) {
  if (timeout.count() < 0) {
    throw_lane_error(what, ": timeout: expected a time of 0 or more, got ", timeout.count(), " ms");
  }
  return std::min(timeout, kLongestTimeout);
}

/// The same for seconds as a number, which may be infinite: NaN is refused, too. A time above 0
/// stays above 0.
inline std::chrono::milliseconds checked_timeout(double seconds, const std::string& what) {
  if (std::isnan(seconds) || seconds < 0) {
    throw_lane_error(what, ": timeout: expected a time of 0 or more, got ", seconds, " s");
  }
  const auto longest = std::chrono::duration<double>(kLongestTimeout).count();
  return std::chrono::ceil<std::chrono::milliseconds>(
      std::chrono::duration<double>(std::min(seconds, longest)));
}

}  // namespace ldt
