// How a message is cut that the ranks of a stage pass on to each other while it comes in.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ldt {

/// The bytes of each piece of a message but the last one; at most `most`, and 1 or more.
///
/// The last of `hops` + 1 ranks has a message of n pieces after the time of n + hops of them, and
/// each piece costs some more, that of a few stream operations: the sum is least where n is the
/// root of hops times the message over what an engine copies in the time that one piece costs.
inline int64_t piece_bytes(int64_t message_bytes, int hops, int64_t most) {
  constexpr double kCostOfPiece = 2 << 20;  // 6 us at 370 GB/s, see docs/performance_gpu.md
  constexpr int64_t kAlignment = 64 << 10;
  const auto best = std::sqrt(hops * static_cast<double>(message_bytes) / kCostOfPiece);
  const auto pieces = std::max<int64_t>(1, std::llround(best));
  const auto share = std::max<int64_t>(1, (message_bytes + pieces - 1) / pieces);
  return std::min(most, (share + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace ldt
