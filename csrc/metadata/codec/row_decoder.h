// Reads one row and plans how it is rebuilt, without building it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "metadata/codec/byte_reader.h"
#include "metadata/format/message.h"
#include "metadata/format/plans.h"

namespace ldt::metadata {

/// Reads the rows of a message in their order. Throws MetadataError for a row that does not fill
/// its length exactly, or whose elements its type cannot hold.
class RowDecoder {
 public:
  RowDecoder(ByteReader& in, Plans& plans, ElementBudget& budget)
      : in_(in), plans_(plans), budget_(budget) {}

  /// Drops the mask, which rules of other microbatches must not follow.
  void start_microbatch() {
    mask_rows_.clear();
    mask_lists_.clear();
  }
  /// All rows of the next tensor, to be written from byte `output` on.
  void tensor(const Form& form, int64_t output);

 private:
  struct SegmentList {
    int64_t first = -1;  // not looked for yet
    int64_t count = 0;
  };

  void read(RowCode code, RowPlan& row);
  void simple(RowCode code, RowPlan& row);
  void packed(RowPlan& row);
  void bits(RowPlan& row);
  void runs(RowPlan& row);
  void raw(RowPlan& row);
  void rule(RowCode code, size_t index, RowPlan& row);
  SegmentList segments_of(size_t mask_row);
  void spend_on_segments(const RowPlan& row);
  void must_fit(const RowPlan& row, int64_t value);

  ByteReader& in_;
  Plans& plans_;
  ElementBudget& budget_;
  std::vector<size_t> mask_rows_;        // numbers in plans_.rows
  std::vector<SegmentList> mask_lists_;  // one for each of them
  std::vector<int64_t> scratch_values_;
  std::vector<Segment> scratch_segments_;
};

}  // namespace ldt::metadata
