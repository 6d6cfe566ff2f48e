// The constants of the wire format, version 1 (docs/wire_format.md). None may change its meaning.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace ldt::metadata {

constexpr std::array<uint8_t, 4> kMagic{'L', 'D', 'T', 'M'};
constexpr uint8_t kVersion = 1;

/// The first byte after the version: the kind of the message.
enum class Kind : uint8_t { kStep = 0, kEval = 1, kCalledOff = 2 };
constexpr uint8_t kKinds = 3;

/// More dimensions than torch allows mean that a message is broken.
constexpr uint64_t kMaxDims = 64;
/// The default limit of elements in one message: 2 GiB of int64. A few bytes can ask for any number
/// of elements, so there must be a limit.
constexpr int64_t kDefaultMaxElements = int64_t{1} << 28;

/// How one row is written. The row encoder picks the code.
enum class RowCode : uint8_t {
  kFull = 0,      // ones
  kLeft = 1,      // zeros, then ones
  kRight = 2,     // ones, then zeros
  kBoth = 3,      // zeros, ones, zeros
  kPacked = 4,    // zeros, segments numbered from 1, zeros
  kBits = 5,      // zeros and ones, a bit each
  kRuns = 6,      // arithmetic runs
  kRaw = 7,       // integers, as differences
  kArange = 8,    // 0, 1, 2, ...
  kCumsum = 9,    // running count of what the mask keeps, minus one
  kSegments = 10  // position inside the mask's segment
};
constexpr uint8_t kRowCodes = 11;

/// A dtype on the wire is its index in this table. Only `integer` types may be metadata.
struct DType {
  std::string_view name;
  uint8_t bytes;
  bool integer;
  bool is_signed;
};
inline constexpr std::array<DType, 24> kDTypes{{
    {"bool", 1, true, false},
    {"uint8", 1, true, false},
    {"int8", 1, true, true},
    {"uint16", 2, true, false},
    {"int16", 2, true, true},
    {"uint32", 4, true, false},
    {"int32", 4, true, true},
    {"uint64", 8, true, false},
    {"int64", 8, true, true},
    {"float16", 2, false, true},
    {"bfloat16", 2, false, true},
    {"float32", 4, false, true},
    {"float64", 8, false, true},
    {"complex32", 4, false, true},
    {"complex64", 8, false, true},
    {"complex128", 16, false, true},
    {"float8_e5m2", 1, false, true},
    {"float8_e4m3fn", 1, false, true},
    {"float8_e5m2fnuz", 1, false, true},
    {"float8_e4m3fnuz", 1, false, true},
    {"float8_e8m0fnu", 1, false, false},
    {"float4_e2m1fn_x2", 1, false, true},
    {"bits8", 1, false, false},
    {"bits16", 2, false, false},
}};

/// The tensors that may be sent as metadata; the rest of a sample stays on the edge. A name on the
/// wire is its index in this table.
struct Name {
  std::string_view text;
  uint8_t min_dims;
  uint8_t max_dims;
  int64_t last_size;  // -1: any
};
inline constexpr std::array<Name, 9> kNames{{
    {"attention_mask", 1, kMaxDims, -1},
    {"position_ids", 1, kMaxDims, -1},
    {"cu_seqlens", 1, 1, -1},
    {"image_grid_thw", 2, 2, 3},
    {"video_grid_thw", 2, 2, 3},
    {"num_images", 0, 1, -1},
    {"num_videos", 0, 1, -1},
    {"token_type_ids", 1, kMaxDims, -1},
    {"decoder_attention_mask", 1, kMaxDims, -1},
}};
constexpr uint8_t kAttentionMask = 0;
constexpr uint8_t kPositionIds = 1;

}  // namespace ldt::metadata
