// The size of the pieces in which the ranks of a stage forward a message.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ldt {

/// The size of every piece of a message but the last: at least 1, at most `most`.
///
/// With n pieces, the last of `hops` + 1 ranks has the message after n + hops piece times, and each
/// piece has a fixed cost of a few stream operations. The sum is minimal at
/// n = sqrt(hops * message / bytes that an engine copies in that fixed time).
inline int64_t piece_bytes(int64_t message_bytes, int hops, int64_t most) {
  constexpr double kCostOfPiece = 2 << 20;  // 6 us at 370 GB/s, see docs/performance_gpu.md
  constexpr int64_t kAlignment = 64 << 10;
  const auto best = std::sqrt(hops * static_cast<double>(message_bytes) / kCostOfPiece);
  const auto pieces = std::max<int64_t>(1, std::llround(best));
  const auto share = std::max<int64_t>(1, (message_bytes + pieces - 1) / pieces);
  return std::min(most, (share + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace ldt
