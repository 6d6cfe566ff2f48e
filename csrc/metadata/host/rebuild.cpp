// One loop per source of elements, for every integer type.
#include "metadata/host/rebuild.h"

#include <algorithm>

#include "metadata/format/format.h"
#include "metadata/host/blockwise.h"

namespace ldt::metadata {
namespace {

// Steps 0 and 1 are the common ones, and the compiler vectorizes their loops.
template <typename Element>
void fill_run(Element* out, int64_t length, int64_t value, int64_t step) {
  const auto start = static_cast<uint64_t>(value);
  if (step == 0) {
    std::fill_n(out, length, static_cast<Element>(value));
  } else if (step == 1) {
    for (int64_t i = 0; i < length; ++i) {
      out[i] = static_cast<Element>(start + static_cast<uint64_t>(i));
    }
  } else {
    for (int64_t i = 0; i < length; ++i) {
      out[i] = static_cast<Element>(start + static_cast<uint64_t>(step) * static_cast<uint64_t>(i));
    }
  }
}

template <typename Element>
void expand_bits(const uint8_t* bits, int64_t length, Element* out) {
  for (int64_t byte = 0; byte < length / 8; ++byte) {
    const unsigned value = bits[byte];
    for (int bit = 0; bit < 8; ++bit) out[8 * byte + bit] = static_cast<Element>(value >> bit & 1);
  }
  for (int64_t i = length / 8 * 8; i < length; ++i) {
    out[i] = static_cast<Element>(bits[i / 8] >> (i % 8) & 1);
  }
}

template <typename Element>
void rebuild_segments(const RowPlan& row, const Segment* segments, Element* out) {
  int64_t index = 0;
  for (int64_t number = 0; number < row.count; ++number) {
    const Segment& segment = segments[number];
    fill_run(out + index, segment.begin - index, row.padding, 0);
    switch (row.source) {
      case Source::kSegmentNumber:
        fill_run(out + segment.begin, segment.length, number + 1, 0);
        break;
      case Source::kKeptCount:
        fill_run(out + segment.begin, segment.length, segment.kept_before, 1);
        break;
      default: fill_run(out + segment.begin, segment.length, 0, 1);
    }
    index = segment.begin + segment.length;
  }
  fill_run(out + index, row.length - index, row.padding, 0);
}

template <typename Element>
void rebuild_as(const RowPlan& row, const RowLists& lists, Element* out) {
  if (row.source == Source::kRuns) {
    const Run* runs = lists.runs + row.first;
    for (int64_t number = 0; number < row.count; ++number) {
      const int64_t end = number + 1 < row.count ? runs[number + 1].begin : row.length;
      const Run& run = runs[number];
      fill_run(out + run.begin, end - run.begin, run.value, run.step);
    }
  } else if (row.source == Source::kBits) {
    expand_bits(lists.bits + row.first, row.length, out);
  } else if (row.source == Source::kValues) {
    const int64_t* values = lists.values + row.first;
    std::transform(values, values + row.length, out,
                   [](int64_t value) { return static_cast<Element>(value); });
  } else {
    rebuild_segments(row, lists.segments + row.first, out);
  }
}

}  // namespace

void rebuild_row(const RowPlan& row, const RowLists& lists, uint8_t* buffer) {
  const DType& type = kDTypes[row.dtype];
  with_integer_type(type.bytes, type.is_signed, [&](auto element) {
    rebuild_as(row, lists, reinterpret_cast<decltype(element)*>(buffer + row.output));
  });
}

void rebuild_values(const RowPlan& row, const RowLists& lists, int64_t* values) {
  rebuild_as(row, lists, values);
}

}  // namespace ldt::metadata
