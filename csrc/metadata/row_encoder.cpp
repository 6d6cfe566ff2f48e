// The choice of a row's code, and how each is written.
#include "metadata/row_encoder.h"

#include <utility>

#include "metadata/blockwise.h"
#include "metadata/format.h"

namespace ldt::metadata {
namespace {

uint64_t bytes_of_bits(int64_t length) { return (static_cast<uint64_t>(length) + 7) / 8; }

void write_code(ByteWriter& out, RowCode code) { out.byte(static_cast<uint8_t>(code)); }

// Wraps around, as integers of a machine do.
int64_t difference(int64_t left, int64_t right) {
  return static_cast<int64_t>(static_cast<uint64_t>(left) - static_cast<uint64_t>(right));
}

}  // namespace

void RowEncoder::mask(const MaskFacts& facts, int64_t length, RowValues& source) {
  if (facts.ones) return simple_mask(facts, length, source);
  const int64_t* values = source.values();
  best_.clear();
  if (facts.numbered) try_packed(facts, values);
  if (facts.binary) try_bits(values, length);
  try_runs(values, length);
  try_raw(values, length);
  out_.append(best_.bytes());
}

void RowEncoder::rule(const RuleFacts& facts, int64_t length, RowValues& source) {
  // A rule that holds is never longer than the integers: these hold the padding, too.
  if (facts.arange) return write_code(out_, RowCode::kArange);
  if (facts.cumsum || facts.segments) {
    write_code(out_, facts.cumsum ? RowCode::kCumsum : RowCode::kSegments);
    return out_.signed_varint(facts.padding);
  }
  const int64_t* values = source.values();
  best_.clear();
  try_runs(values, length);
  try_raw(values, length);
  out_.append(best_.bytes());
}

void RowEncoder::simple_mask(const MaskFacts& facts, int64_t length, RowValues& source) {
  const auto left = static_cast<uint64_t>(facts.begin);
  const auto right = static_cast<uint64_t>(length - facts.end);
  if (left == 0 && right == 0) return write_code(out_, RowCode::kFull);
  const uint64_t counts =
      (left != 0 ? varint_bytes(left) : 0) + (right != 0 ? varint_bytes(right) : 0);
  if (bytes_of_bits(length) < counts) {  // rows of at most 8 elements, padded on both sides
    best_.clear();
    try_bits(source.values(), length);
    return out_.append(best_.bytes());
  }
  write_code(out_, right == 0 ? RowCode::kLeft : left == 0 ? RowCode::kRight : RowCode::kBoth);
  if (left != 0) out_.varint(left);
  if (right != 0) out_.varint(right);
}

void RowEncoder::keep_if_shorter() {
  if (!too_long()) std::swap(best_, trial_);
}

void RowEncoder::try_packed(const MaskFacts& facts, const int64_t* values) {
  trial_.clear();
  write_code(trial_, RowCode::kPacked);
  trial_.varint(static_cast<uint64_t>(facts.begin));
  trial_.varint(static_cast<uint64_t>(values[facts.end - 1]));  // the last number is the count
  for (int64_t index = facts.begin; index < facts.end;) {
    const auto number = static_cast<uint64_t>(values[index]);
    const int64_t end = first_difference(index, facts.end, [values, number](int64_t i) {
      return static_cast<uint64_t>(values[i]) ^ number;
    });
    trial_.varint(static_cast<uint64_t>(end - index));
    index = end;
  }
  keep_if_shorter();
}

void RowEncoder::try_bits(const int64_t* values, int64_t length) {
  trial_.clear();
  write_code(trial_, RowCode::kBits);
  uint8_t* bits = trial_.extend(bytes_of_bits(length));
  for (int64_t byte = 0; byte < length / 8; ++byte) {
    unsigned value = 0;
    for (int bit = 0; bit < 8; ++bit) {
      value |= static_cast<unsigned>(values[8 * byte + bit] & 1) << bit;
    }
    bits[byte] = static_cast<uint8_t>(value);
  }
  for (int64_t index = length / 8 * 8; index < length; ++index) {
    bits[index / 8] = static_cast<uint8_t>(bits[index / 8] | (values[index] & 1) << (index % 8));
  }
  keep_if_shorter();
}

void RowEncoder::try_runs(const int64_t* values, int64_t length) {
  trial_.clear();
  write_code(trial_, RowCode::kRuns);
  for (int64_t index = 0; index < length && !too_long();) {
    const bool last = index + 1 == length;
    const int64_t step = last ? 0 : difference(values[index + 1], values[index]);
    const int64_t end = first_difference(index + 1, length, [values, step](int64_t i) {
      return static_cast<uint64_t>(difference(values[i], values[i - 1]) ^ step);
    });
    trial_.varint(static_cast<uint64_t>(end - index));
    trial_.signed_varint(values[index]);
    if (end - index > 1) trial_.signed_varint(step);
    index = end;
  }
  keep_if_shorter();
}

void RowEncoder::try_raw(const int64_t* values, int64_t length) {
  if (best_.size() != 0 && best_.size() <= static_cast<uint64_t>(length)) return;
  trial_.clear();
  write_code(trial_, RowCode::kRaw);
  int64_t before = 0;
  for (int64_t index = 0; index < length && !too_long(); ++index) {
    trial_.signed_varint(difference(values[index], before));
    before = values[index];
  }
  keep_if_shorter();
}

}  // namespace ldt::metadata
