// Scans one row on the host: the kind of mask, the rule it follows, its segments.
#pragma once

#include <cstdint>
#include <vector>

#include "metadata/format/format.h"
#include "metadata/format/rows.h"

namespace ldt::metadata {

/// One pass over the row, a block of elements at a time.
MaskFacts scan_mask(const void* row, const DType& type, int64_t length);

/// Whether a row of position_ids follows `segments`, those of its mask's row (null: there is none).
/// Rules are tried in the order of RuleFacts; what comes after the first that holds is not set.
RuleFacts scan_rules(const void* row, const DType& type, int64_t length,
                     const std::vector<Segment>* segments);

/// The segments of a row, in order, into `segments`, which is emptied first.
void find_segments(const MaskFacts& facts, std::vector<Segment>& segments);  // of ones, or of zeros
void find_segments(const int64_t* row, int64_t length, std::vector<Segment>& segments);
/// Those of a row of bits, the lowest of a byte first, after what `segments` holds.
void append_segments_of_bits(const uint8_t* bits, int64_t length, std::vector<Segment>& segments);

/// The row's elements as 64-bit integers.
void widen(const void* row, const DType& type, int64_t length, int64_t* values);

}  // namespace ldt::metadata
