// Walks a mask's row as stretches of equal elements, over its elements or over bits from a device.
#pragma once

#include <bit>
#include <cstdint>

#include "metadata/format/row_source.h"
#include "metadata/host/blockwise.h"

namespace ldt::metadata {

struct EqualStretch {
  int64_t end;
  int64_t value;
};

class ValueStretches {
 public:
  ValueStretches(const int64_t* values, int64_t length) : values_(values), length_(length) {}

  /// The stretch from `begin`, the end of the previous one.
  EqualStretch next(int64_t begin) {
    const auto value = static_cast<uint64_t>(values_[begin]);
    const int64_t end = first_difference(begin + 1, length_, [values = values_, value](int64_t i) {
      return static_cast<uint64_t>(values[i]) ^ value;
    });
    return {end, values_[begin]};
  }

 private:
  const int64_t* values_;
  int64_t length_;
};

class BitStretches {
 public:
  /// `numbered`: the row holds segments.
  BitStretches(const RowBits& bits, int64_t length, bool numbered)
      : bits_(bits), length_(length), step_(numbered ? 1 : 0) {}

  /// The same. Call it in order, as it counts stretches.
  EqualStretch next(int64_t begin) {
    const bool kept = (bits_.nonzero[begin / 32] >> (begin % 32) & 1) != 0;
    const int64_t end = next_change(begin + 1);
    if (!kept) return {end, 0};
    number_ += number_ == 0 ? 1 : step_;
    return {end, number_};
  }

 private:
  int64_t next_change(int64_t index) const {
    if (index >= length_) return length_;
    const uint32_t rest = bits_.changed[index / 32] >> (index % 32);
    if (rest != 0) return index + std::countr_zero(rest);
    const int64_t words = (length_ + 31) / 32;
    const int64_t word = first_difference(
        index / 32 + 1, words, [changed = bits_.changed](int64_t i) { return changed[i]; });
    return word >= words ? length_ : word * 32 + std::countr_zero(bits_.changed[word]);
  }

  RowBits bits_;
  int64_t length_;
  int64_t step_;
  int64_t number_ = 0;
};

}  // namespace ldt::metadata
