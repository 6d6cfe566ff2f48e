// A row of a metadata tensor in compact form, and its elements. Shared by the host and by kernels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LDT_HOST_DEVICE __host__ __device__
#else
#define LDT_HOST_DEVICE
#endif

namespace ldt::metadata {

/// A stretch of one nonzero number in a mask's row. `kept_before`: the number of nonzero elements
/// before it.
struct Segment {
  int64_t begin;
  int64_t length;
  int64_t kept_before;
};

/// Elements from `begin` to the next run's begin: value, value + step, ... (modulo 2^64).
struct Run {
  int64_t begin;
  int64_t value;
  int64_t step;
};

/// Where the elements of a row come from. The first three are `padding` outside the segments.
enum class Source : uint8_t {
  kSegmentNumber,  // in segment k (from 1): k
  kKeptCount,      // the number of nonzero mask elements before this one
  kSegmentIndex,   // the distance from the segment's begin
  kRuns,           // arithmetic runs
  kBits,           // one bit each, lowest first
  kValues          // int64, one by one
};

/// How to rebuild one row. `first` is the offset in the list that the source names: in elements of
/// RowLists::segments, runs or values, or in bytes of RowLists::bits.
struct RowPlan {
  int64_t output;  // byte offset in the buffer of all tensors
  int64_t length;
  int64_t first;
  int64_t count;
  int64_t padding;
  Source source;
  uint8_t dtype;  // index in kDTypes
  uint8_t bytes;  // of an element
};

/// The lists that rows refer to.
struct RowLists {
  const Segment* segments;
  const Run* runs;
  const int64_t* values;
  const uint8_t* bits;
};

/// The facts of a row of attention_mask. begin == end == length: all zeros.
struct MaskFacts {
  int64_t begin;  // of the first element that is not 0
  int64_t end;    // past the last element that is not 0
  bool ones;      // nothing but 1 between
  bool binary;    // nothing but 0 and 1 between
  bool numbered;  // begins with 1 and never falls nor rises by more than 1 between
};

/// The facts of a row of any other tensor. Only position_ids follow a mask.
struct RuleFacts {
  bool arange;      // 0, 1, 2, ...
  bool cumsum;      // Source::kKeptCount of the mask's row, with padding
  bool segments;    // Source::kSegmentIndex of the mask's row, with padding
  int64_t padding;  // the element at the mask's first 0; 0 if there is none
};

/// Element `index` of an integer tensor of the given element size and signedness. 64 bits are read
/// as signed.
LDT_HOST_DEVICE inline int64_t load_integer(const void* data, int64_t index, int bytes,
                                            bool is_signed) {
  switch (bytes) {
    case 1:
      return is_signed ? static_cast<int64_t>(static_cast<const int8_t*>(data)[index])
                       : static_cast<int64_t>(static_cast<const uint8_t*>(data)[index]);
    case 2:
      return is_signed ? static_cast<int64_t>(static_cast<const int16_t*>(data)[index])
                       : static_cast<int64_t>(static_cast<const uint16_t*>(data)[index]);
    case 4:
      return is_signed ? static_cast<int64_t>(static_cast<const int32_t*>(data)[index])
                       : static_cast<int64_t>(static_cast<const uint32_t*>(data)[index]);
    default: return static_cast<const int64_t*>(data)[index];
  }
}

/// Writes the low `bytes` bytes of `value` to element `index`.
LDT_HOST_DEVICE inline void store_integer(void* data, int64_t index, int bytes, int64_t value) {
  switch (bytes) {
    case 1: static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(value); break;
    case 2: static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(value); break;
    case 4: static_cast<uint32_t*>(data)[index] = static_cast<uint32_t>(value); break;
    default: static_cast<int64_t*>(data)[index] = value;
  }
}

/// The last of `count` stretches that begins at or before `index`; -1 if none does.
template <typename Stretch>
LDT_HOST_DEVICE inline int64_t last_begun(const Stretch* stretches, int64_t count, int64_t index) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (stretches[middle].begin <= index) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

/// Element `index` of the row, as kernels write it. The host's loops must agree.
LDT_HOST_DEVICE inline int64_t value_at(const RowPlan& row, const RowLists& lists, int64_t index) {
  if (row.source == Source::kValues) return lists.values[row.first + index];
  if (row.source == Source::kBits) {
    return (lists.bits[row.first + index / 8] >> (index % 8)) & 1;
  }
  if (row.source == Source::kRuns) {
    const Run* runs = lists.runs + row.first;
    const Run run = runs[last_begun(runs, row.count, index)];
    const auto steps = static_cast<uint64_t>(index - run.begin);
    return static_cast<int64_t>(static_cast<uint64_t>(run.value) +
                                static_cast<uint64_t>(run.step) * steps);
  }
  const Segment* segments = lists.segments + row.first;
  const int64_t number = last_begun(segments, row.count, index);
  if (number < 0) return row.padding;
  const Segment segment = segments[number];
  const int64_t inside = index - segment.begin;
  if (inside >= segment.length) return row.padding;
  if (row.source == Source::kSegmentNumber) return number + 1;
  return row.source == Source::kSegmentIndex ? inside : segment.kept_before + inside;
}

}  // namespace ldt::metadata
