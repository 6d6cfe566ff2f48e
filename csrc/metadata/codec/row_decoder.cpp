// Turns row codes into row plans. Allocates in proportion to the bytes that were read.
#include "metadata/codec/row_decoder.h"

#include <algorithm>

#include "metadata/format/error.h"
#include "metadata/host/rebuild.h"
#include "metadata/host/scan.h"

namespace ldt::metadata {
namespace {

bool fits(const DType& type, int64_t value) {
  if (type.bytes == 8) return true;
  if (type.name == "bool") return value == 0 || value == 1;
  const int bits = 8 * type.bytes;
  if (!type.is_signed) return value >= 0 && value < (int64_t{1} << bits);
  return value >= -(int64_t{1} << (bits - 1)) && value < (int64_t{1} << (bits - 1));
}

// Padding and segments are for masks, rules for what follows them, integers for all.
bool may_have(uint8_t name, RowCode code) {
  if (name == kAttentionMask) return code <= RowCode::kRaw;
  const bool follows = code == RowCode::kCumsum || code == RowCode::kSegments;
  return code >= RowCode::kRuns && (!follows || name == kPositionIds);
}

// The run's last element; nothing if 64 bits cannot hold it.
std::optional<int64_t> last_of(const Run& run, int64_t length) {
  int64_t way = 0;
  int64_t last = 0;
  if (__builtin_mul_overflow(run.step, length - 1, &way)) return std::nullopt;
  if (__builtin_add_overflow(run.value, way, &last)) return std::nullopt;
  return last;
}

}  // namespace

void RowDecoder::tensor(const Form& form, int64_t output) {
  const RowShape shape = rows_of(form);
  if (static_cast<uint64_t>(shape.rows) > in_.remaining()) {
    fail("metadata message: ", describe(form), " has ", shape.rows, " rows, but only ",
         in_.remaining(), " bytes follow; the message is cut short or damaged");
  }
  const DType& type = kDTypes[form.dtype];
  for (int64_t index = 0; index < shape.rows; ++index) {
    RowPlan row{output + index * shape.length * type.bytes,
                shape.length,
                0,
                0,
                0,
                Source::kRuns,
                form.dtype,
                type.bytes};
    const uint8_t code = in_.byte("a row's code");
    if (code >= kRowCodes) {
      fail("metadata message: expected the code of a row below ", int{kRowCodes}, " at byte ",
           in_.offset() - 1, ", got ", int{code}, "; use the same version of ldt on all ranks");
    }
    const auto known = static_cast<RowCode>(code);
    if (!may_have(form.name, known)) {
      fail("metadata message: a row of ", kNames[form.name].text, " has the code ", int{code},
           " at byte ", in_.offset() - 1, ", which is not for it; the message is damaged");
    }
    if (known == RowCode::kCumsum || known == RowCode::kSegments) {
      rule(known, static_cast<size_t>(index), row);
    } else {
      read(known, row);
    }
    if (form.name == kAttentionMask) {
      mask_rows_.push_back(plans_.rows.size());
      mask_lists_.emplace_back();
    }
    plans_.rows.push_back(row);
  }
}

void RowDecoder::read(RowCode code, RowPlan& row) {
  switch (code) {
    case RowCode::kPacked: return packed(row);
    case RowCode::kBits: return bits(row);
    case RowCode::kRuns: return runs(row);
    case RowCode::kRaw: return raw(row);
    case RowCode::kArange:
      must_fit(row, row.length - 1);
      row.first = static_cast<int64_t>(plans_.runs.size());
      row.count = 1;
      plans_.runs.push_back({0, 0, 1});
      return;
    default: return simple(code, row);
  }
}

void RowDecoder::simple(RowCode code, RowPlan& row) {
  const auto length = static_cast<uint64_t>(row.length);
  uint64_t left = 0;
  uint64_t right = 0;
  if (code == RowCode::kLeft || code == RowCode::kBoth) left = in_.varint_up_to(length, "padding");
  if (code == RowCode::kRight || code == RowCode::kBoth) {
    right = in_.varint_up_to(length - left, "padding");
  }
  row.source = Source::kSegmentNumber;
  row.first = static_cast<int64_t>(plans_.segments.size());
  if (left + right == length) return;
  row.count = 1;
  plans_.segments.push_back(
      {static_cast<int64_t>(left), static_cast<int64_t>(length - left - right), 0});
}

void RowDecoder::packed(RowPlan& row) {
  auto left = static_cast<uint64_t>(row.length);
  int64_t begin = static_cast<int64_t>(in_.varint_up_to(left, "padding"));
  left -= static_cast<uint64_t>(begin);
  const size_t count = in_.count("the number of segments");
  row.source = Source::kSegmentNumber;
  row.first = static_cast<int64_t>(plans_.segments.size());
  row.count = static_cast<int64_t>(count);
  must_fit(row, row.count);
  int64_t kept = 0;
  for (size_t number = 0; number < count; ++number) {
    const uint64_t length = in_.varint_up_to(left, "a segment's length");
    if (length == 0) fail("metadata message: expected segments of at least 1 element, got 0");
    plans_.segments.push_back({begin, static_cast<int64_t>(length), kept});
    begin += static_cast<int64_t>(length);
    kept += static_cast<int64_t>(length);
    left -= length;
  }
}

void RowDecoder::bits(RowPlan& row) {
  const uint64_t count = (static_cast<uint64_t>(row.length) + 7) / 8;
  const uint8_t* taken = in_.take(count, "a row of bits");
  if (row.length % 8 != 0 && (taken[count - 1] >> (row.length % 8)) != 0) {
    fail("metadata message: a row of ", row.length, " bits has bits past its end");
  }
  row.source = Source::kBits;
  row.first = static_cast<int64_t>(plans_.bits.size());
  plans_.bits.insert(plans_.bits.end(), taken, taken + count);
}

void RowDecoder::runs(RowPlan& row) {
  row.source = Source::kRuns;
  row.first = static_cast<int64_t>(plans_.runs.size());
  for (int64_t index = 0; index < row.length; ++row.count) {
    const uint64_t length =
        in_.varint_up_to(static_cast<uint64_t>(row.length - index), "a run's length");
    if (length == 0) fail("metadata message: expected runs of at least 1 element, got 0");
    Run run{index, in_.signed_varint("a run's value"), 0};
    if (length > 1) run.step = in_.signed_varint("a run's step");
    must_fit(row, run.value);
    const auto last = last_of(run, static_cast<int64_t>(length));
    // 64 bits may wrap: unsigned arithmetic, as signed overflow is undefined.
    if (last || kDTypes[row.dtype].bytes < 8) must_fit(row, last ? *last : INT64_MAX);
    plans_.runs.push_back(run);
    index += static_cast<int64_t>(length);
  }
}

void RowDecoder::raw(RowPlan& row) {
  if (static_cast<uint64_t>(row.length) > in_.remaining()) {
    in_.take(static_cast<uint64_t>(row.length), "a row of integers");
  }
  row.source = Source::kValues;
  row.first = static_cast<int64_t>(plans_.values.size());
  uint64_t value = 0;
  for (int64_t index = 0; index < row.length; ++index) {
    value += static_cast<uint64_t>(in_.signed_varint("an integer"));
    must_fit(row, static_cast<int64_t>(value));
    plans_.values.push_back(static_cast<int64_t>(value));
  }
}

void RowDecoder::rule(RowCode code, size_t index, RowPlan& row) {
  row.padding = in_.signed_varint("the padding");
  if (mask_rows_.empty() || plans_.rows[mask_rows_[0]].length != row.length) {
    fail("metadata message: a row of ", row.length, " elements at byte ", in_.offset(),
         " follows a mask, but the microbatch has none of this length");
  }
  const SegmentList list = segments_of(index % mask_rows_.size());
  row.first = list.first;
  row.count = list.count;
  row.source = code == RowCode::kCumsum ? Source::kKeptCount : Source::kSegmentIndex;
  must_fit(row, row.padding);
  const Segment* segments = plans_.segments.data() + list.first;
  int64_t longest = 0;
  if (code == RowCode::kCumsum && list.count > 0) {
    const Segment& last = segments[list.count - 1];
    longest = last.kept_before + last.length;
  }
  if (code == RowCode::kSegments) {
    for (int64_t i = 0; i < list.count; ++i) longest = std::max(longest, segments[i].length);
  }
  must_fit(row, longest > 0 ? longest - 1 : 0);
}

RowDecoder::SegmentList RowDecoder::segments_of(size_t mask_row) {
  SegmentList& list = mask_lists_[mask_row];
  if (list.first >= 0) return list;
  const RowPlan& row = plans_.rows[mask_rows_[mask_row]];
  if (row.source == Source::kSegmentNumber) {
    list = {row.first, row.count};
    return list;
  }
  if (row.source == Source::kBits) {
    list.first = static_cast<int64_t>(plans_.segments.size());
    append_segments_of_bits(plans_.bits.data() + row.first, row.length, plans_.segments);
    list.count = static_cast<int64_t>(plans_.segments.size()) - list.first;
    return list;
  }
  if (row.source == Source::kRuns) spend_on_segments(row);
  scratch_values_.resize(static_cast<size_t>(row.length));
  rebuild_values(row, plans_.lists(), scratch_values_.data());
  find_segments(scratch_values_.data(), row.length, scratch_segments_);
  list = {static_cast<int64_t>(plans_.segments.size()),
          static_cast<int64_t>(scratch_segments_.size())};
  plans_.segments.insert(plans_.segments.end(), scratch_segments_.begin(), scratch_segments_.end());
  return list;
}

// Only these rows may have many more segments than bytes: each element of a run with a step is one.
void RowDecoder::spend_on_segments(const RowPlan& row) {
  const Run* runs = plans_.runs.data() + row.first;
  int64_t segments = 0;
  for (int64_t i = 0; i < row.count; ++i) {
    const int64_t end = i + 1 < row.count ? runs[i + 1].begin : row.length;
    segments += runs[i].step == 0 ? 1 : end - runs[i].begin;
  }
  constexpr int64_t kElementsOfSegment = sizeof(Segment) / sizeof(int64_t);
  budget_.spend(row.length, "a rule over a mask of runs");
  budget_.spend(segments * kElementsOfSegment, "a rule over a mask of runs");
}

void RowDecoder::must_fit(const RowPlan& row, int64_t value) {
  const DType& type = kDTypes[row.dtype];
  if (fits(type, value)) return;
  fail("metadata message: expected elements that ", type.name, " can hold, got ", value,
       " before byte ", in_.offset(), "; the message is damaged");
}

}  // namespace ldt::metadata
