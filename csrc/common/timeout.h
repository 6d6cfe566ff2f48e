// Checks timeouts that callers pass, and caps those that would overflow a clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "common/error.h"

namespace ldt {

/// 100 years. Clocks count nanoseconds in 63 bits (292 years), so adding it to now() is safe.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365 * 100);

/// Caps `timeout` at kLongestTimeout. Throws LaneError for a negative one; the text begins with
/// `what`.
inline std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout,
                                                 const std::string& what) {
  if (timeout.count() < 0) {
    throw_lane_error(what, ": timeout: expected a time of 0 or more, got ", timeout.count(), " ms");
  }
  return std::min(timeout, kLongestTimeout);
}

/// The same for seconds. Infinity is allowed, NaN throws, and a positive time stays positive.
inline std::chrono::milliseconds checked_timeout(double seconds, const std::string& what) {
  if (std::isnan(seconds) || seconds < 0) {
    throw_lane_error(what, ": timeout: expected a time of 0 or more, got ", seconds, " s");
  }
  const auto longest = std::chrono::duration<double>(kLongestTimeout).count();
  return std::chrono::ceil<std::chrono::milliseconds>(
      std::chrono::duration<double>(std::min(seconds, longest)));
}

}  // namespace ldt
