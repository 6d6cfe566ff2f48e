// The decoded rows: a plan per row, over lists that rows share.
#pragma once

#include <cstdint>
#include <vector>

#include "metadata/format/rows.h"

namespace ldt::metadata {

/// Owns the rows and the lists. At most about 64 times the size of the message, as one bit of a row
/// may begin a segment.
struct Plans {
  std::vector<RowPlan> rows;
  std::vector<Segment> segments;
  std::vector<Run> runs;
  std::vector<int64_t> values;
  std::vector<uint8_t> bits;

  RowLists lists() const { return {segments.data(), runs.data(), values.data(), bits.data()}; }
};

}  // namespace ldt::metadata
