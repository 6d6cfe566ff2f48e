// Tries the codes that fit a row and keeps the shortest.
#include "metadata/codec/row_encoder.h"

#include <bit>
#include <cstring>
#include <utility>

#include "metadata/format/format.h"
#include "metadata/host/blockwise.h"

namespace ldt::metadata {
namespace {

uint64_t bytes_of_bits(int64_t length) { return (static_cast<uint64_t>(length) + 7) / 8; }

void write_code(ByteWriter& out, RowCode code) { out.byte(static_cast<uint8_t>(code)); }

// Wraps around modulo 2^64.
int64_t difference(int64_t left, int64_t right) {
  return static_cast<int64_t>(static_cast<uint64_t>(left) - static_cast<uint64_t>(right));
}

}  // namespace

void RowEncoder::mask(const MaskFacts& facts, int64_t length, RowValues& source) {
  if (facts.ones) return simple_mask(facts, length, source);
  best_.clear();
  if (const RowBits bits = source.bits(); bits.nonzero != nullptr) {
    const BitStretches stretches(bits, length, facts.numbered);
    if (facts.numbered) try_packed(facts, stretches);
    if (facts.binary) try_bits(bits, length);
    try_runs_of_stretches(stretches, length);
  } else {
    const int64_t* values = source.values();
    if (facts.numbered) try_packed(facts, ValueStretches(values, length));
    if (facts.binary) try_bits(values, length);
    try_runs(values, length);
  }
  if (raw_may_be_shorter(length)) try_raw(source.values(), length);
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
  if (raw_may_be_shorter(length)) try_raw(values, length);
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

template <typename Stretches>
void RowEncoder::try_packed(const MaskFacts& facts, Stretches stretches) {
  lengths_.clear();
  int64_t index = facts.begin == 0 ? 0 : stretches.next(0).end;
  uint64_t count = 0;
  for (; index < facts.end; ++count) {
    const int64_t end = stretches.next(index).end;
    lengths_.varint(static_cast<uint64_t>(end - index));
    index = end;
  }
  trial_.clear();
  write_code(trial_, RowCode::kPacked);
  trial_.varint(static_cast<uint64_t>(facts.begin));
  trial_.varint(count);
  trial_.append(lengths_.bytes());
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

void RowEncoder::try_bits(const RowBits& bits, int64_t length) {
  static_assert(std::endian::native == std::endian::little);  // words are the bytes of the format
  trial_.clear();
  write_code(trial_, RowCode::kBits);
  const uint64_t bytes = bytes_of_bits(length);
  std::memcpy(trial_.extend(bytes), bits.nonzero, bytes);
  keep_if_shorter();
}

// The runs that try_runs finds: the rest of a stretch, or a single element with the single elements
// that continue its step, up to and including the first of the next stretch.
template <typename Stretches>
void RowEncoder::try_runs_of_stretches(Stretches stretches, int64_t length) {
  trial_.clear();
  write_code(trial_, RowCode::kRuns);
  EqualStretch now = stretches.next(0);
  for (int64_t index = 0; index < length && !too_long();) {
    const int64_t begin = index;
    const int64_t value = now.value;
    int64_t step = 0;
    index = now.end;
    if (now.end < length) {
      const bool single = now.end - begin == 1;
      now = stretches.next(now.end);
      step = single ? difference(now.value, value) : 0;
      if (single) ++index;
      int64_t last = now.value;
      while (single && now.end == index && index < length) {
        now = stretches.next(index);
        if (difference(now.value, last) != step) break;
        last = now.value;
        ++index;
      }
    }
    trial_.varint(static_cast<uint64_t>(index - begin));
    trial_.signed_varint(value);
    if (index - begin > 1) trial_.signed_varint(step);
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

// RAW takes a byte for the code and at least one for each element.
bool RowEncoder::raw_may_be_shorter(int64_t length) const {
  return best_.size() == 0 || best_.size() > static_cast<uint64_t>(length);
}

void RowEncoder::try_raw(const int64_t* values, int64_t length) {
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
