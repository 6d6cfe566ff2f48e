// Row scans for every integer type, built on one vectorized search.
#include "metadata/host/scan.h"

#include <bit>
#include <cstring>
#include <type_traits>

#include "metadata/host/blockwise.h"

namespace ldt::metadata {
namespace {

template <typename Element>
MaskFacts scan_mask_of(const Element* row, int64_t length) {
  using Bits = std::make_unsigned_t<Element>;
  const auto nonzero = [row](int64_t i) { return static_cast<Bits>(row[i]); };
  const auto not_one = [row](int64_t i) { return static_cast<Bits>(row[i] ^ 1); };
  const int64_t begin = first_difference(0, length, nonzero);
  const int64_t ones_end = first_difference(begin, length, not_one);
  const int64_t next = first_difference(ones_end, length, nonzero);
  if (next == length) return {begin, ones_end, true, true, ones_end > begin};

  const int64_t end = past_last_difference(next, length, nonzero);
  const auto not_binary = [row](int64_t i) {
    return static_cast<Bits>(row[i] & static_cast<Element>(~Element{1}));
  };
  // The difference is taken in the element's own type, where the step from the largest number to
  // the smallest looks like +1. Segments are numbered from 1, so they never hold the result.
  const auto falls_or_jumps = [row](int64_t i) {
    const auto step = static_cast<Bits>(static_cast<Bits>(row[i]) - static_cast<Bits>(row[i - 1]));
    const auto wrapped = static_cast<Bits>(row[i] <= 0);
    return static_cast<Bits>((step & static_cast<Bits>(~Bits{1})) | wrapped);
  };
  MaskFacts facts{begin, end, false, false, false};
  facts.binary = first_difference(ones_end, end, not_binary) == end;
  facts.numbered = row[begin] == 1 && first_difference(begin + 1, end, falls_or_jumps) == end;
  return facts;
}

template <typename Element>
bool is_constant(const Element* row, int64_t begin, int64_t end, int64_t value) {
  using Bits = std::make_unsigned_t<Element>;
  if (begin < end && static_cast<int64_t>(row[begin]) != value) return false;
  const auto wanted = static_cast<Element>(value);
  return first_difference(begin, end, [row, wanted](int64_t i) {
           return static_cast<Bits>(row[i] ^ wanted);
         }) == end;
}

// Whether the elements are value, value + 1, ... without a wrap in their own type.
template <typename Element>
bool is_counting(const Element* row, int64_t begin, int64_t end, int64_t value) {
  using Bits = std::make_unsigned_t<Element>;
  if (begin >= end) return true;
  const int64_t last = value + (end - 1 - begin);
  if (static_cast<int64_t>(row[begin]) != value || static_cast<int64_t>(row[end - 1]) != last) {
    return false;
  }
  const auto shift = static_cast<Bits>(static_cast<uint64_t>(value) - static_cast<uint64_t>(begin));
  return first_difference(begin, end, [row, shift](int64_t i) {
           return static_cast<Bits>(static_cast<Bits>(row[i]) - static_cast<Bits>(i) - shift);
         }) == end;
}

// The index of the first element outside all segments; -1 if there is none.
int64_t first_padding(const std::vector<Segment>& segments, int64_t length) {
  int64_t index = 0;
  for (const Segment& segment : segments) {
    if (segment.begin != index) return index;
    index += segment.length;
  }
  return index < length ? index : -1;
}

template <typename Element>
bool follows(const Element* row, int64_t length, const std::vector<Segment>& segments,
             int64_t padding, bool count_on) {
  int64_t index = 0;
  for (const Segment& segment : segments) {
    const int64_t end = segment.begin + segment.length;
    if (!is_counting(row, segment.begin, end, count_on ? segment.kept_before : 0)) return false;
    if (!is_constant(row, index, segment.begin, padding)) return false;
    index = end;
  }
  return is_constant(row, index, length, padding);
}

template <typename Element>
RuleFacts scan_rules_of(const Element* row, int64_t length, const std::vector<Segment>* segments) {
  RuleFacts facts{false, false, false, 0};
  facts.arange = is_counting(row, 0, length, 0);
  if (facts.arange || segments == nullptr) return facts;
  const int64_t outside = first_padding(*segments, length);
  if (outside >= 0) facts.padding = static_cast<int64_t>(row[outside]);
  facts.cumsum = follows(row, length, *segments, facts.padding, true);
  if (!facts.cumsum) facts.segments = follows(row, length, *segments, facts.padding, false);
  return facts;
}

// Up to 64 bits from a byte on, zeros past the end.
uint64_t load_bits(const uint8_t* from, int64_t bytes) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t word = 0;
  if (bytes >= 8) {
    std::memcpy(&word, from, 8);
  } else {
    std::memcpy(&word, from, static_cast<size_t>(bytes));
  }
  return word;
}

}  // namespace

MaskFacts scan_mask(const void* row, const DType& type, int64_t length) {
  return with_integer_type(type.bytes, type.is_signed, [&](auto element) {
    return scan_mask_of(static_cast<const decltype(element)*>(row), length);
  });
}

RuleFacts scan_rules(const void* row, const DType& type, int64_t length,
                     const std::vector<Segment>* segments) {
  return with_integer_type(type.bytes, type.is_signed, [&](auto element) {
    return scan_rules_of(static_cast<const decltype(element)*>(row), length, segments);
  });
}

void find_segments(const MaskFacts& facts, std::vector<Segment>& segments) {
  segments.clear();
  if (facts.end > facts.begin) segments.push_back({facts.begin, facts.end - facts.begin, 0});
}

void find_segments(const int64_t* row, int64_t length, std::vector<Segment>& segments) {
  segments.clear();
  int64_t kept = 0;
  for (int64_t index = 0; index < length;) {
    const auto value = static_cast<uint64_t>(row[index]);
    const int64_t end = first_difference(
        index, length, [row, value](int64_t i) { return static_cast<uint64_t>(row[i]) ^ value; });
    if (value != 0) {
      segments.push_back({index, end - index, kept});
      kept += end - index;
    }
    index = end;
  }
}

void append_segments_of_bits(const uint8_t* bits, int64_t length, std::vector<Segment>& segments) {
  const int64_t bytes = (length + 7) / 8;
  int64_t kept = 0;
  int64_t begin = -1;  // of the open segment
  uint64_t before = 0;
  for (int64_t byte = 0; byte < bytes; byte += 8) {
    const uint64_t word = load_bits(bits + byte, bytes - byte);
    for (uint64_t edges = word ^ (word << 1 | before); edges != 0; edges &= edges - 1) {
      const int64_t index = 8 * byte + std::countr_zero(edges);
      if (begin < 0) {
        begin = index;
        continue;
      }
      segments.push_back({begin, index - begin, kept});
      kept += index - begin;
      begin = -1;
    }
    before = word >> 63;
  }
  if (begin >= 0) segments.push_back({begin, length - begin, kept});
}

void widen(const void* row, const DType& type, int64_t length, int64_t* values) {
  with_integer_type(type.bytes, type.is_signed, [&](auto element) {
    const auto* typed = static_cast<const decltype(element)*>(row);
    for (int64_t i = 0; i < length; ++i) values[i] = static_cast<int64_t>(typed[i]);
  });
}

}  // namespace ldt::metadata
