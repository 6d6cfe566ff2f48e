// Searches a row block by block. The inner loops have no exit, so that the compiler vectorizes
// them.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace ldt::metadata {

/// The first index in [begin, end) for which `differs(index)` is not 0; end if there is none.
/// `differs` is a few integer operations without a branch.
template <typename Differs>
int64_t first_difference(int64_t begin, int64_t end, const Differs& differs) {
  using Result = std::decay_t<decltype(differs(begin))>;
  constexpr int64_t kBlock = 512 / sizeof(Result);
  constexpr int64_t kNear = 8;  // a block is a waste where stretches are short
  int64_t index = begin;
  for (const int64_t near = end - begin < kNear ? end : begin + kNear; index < near; ++index) {
    if (differs(index) != 0) return index;
  }
  for (; end - index >= kBlock; index += kBlock) {
    Result any = 0;
    for (int64_t step = 0; step < kBlock; ++step) any |= differs(index + step);
    if (any != 0) break;
  }
  while (index < end && differs(index) == 0) ++index;
  return index;
}

/// Like first_difference from the other side: one past the last such element; begin if there is
/// none.
template <typename Differs>
int64_t past_last_difference(int64_t begin, int64_t end, const Differs& differs) {
  using Result = std::decay_t<decltype(differs(begin))>;
  constexpr int64_t kBlock = 512 / sizeof(Result);
  int64_t past = end;
  for (; past - begin >= kBlock; past -= kBlock) {
    Result any = 0;
    for (int64_t step = 1; step <= kBlock; ++step) any |= differs(past - step);
    if (any != 0) break;
  }
  while (past > begin && differs(past - 1) == 0) --past;
  return past;
}

/// Calls `body` with a value of the C++ type that has `bytes` and sign.
template <typename Body>
decltype(auto) with_integer_type(int bytes, bool is_signed, const Body& body) {
  switch (bytes) {
    case 1: return is_signed ? body(int8_t{}) : body(uint8_t{});
    case 2: return is_signed ? body(int16_t{}) : body(uint16_t{});
    case 4: return is_signed ? body(int32_t{}) : body(uint32_t{});
    default: return body(int64_t{});
  }
}

}  // namespace ldt::metadata
