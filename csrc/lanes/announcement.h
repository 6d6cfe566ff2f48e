// What both ends of a lane exchange before a payload, so that a mismatch is an error, not garbage.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace ldt {

/// A message as one end sees it. Both ends send theirs and compare, which adds no round trip to a
/// receive posted in time. Its size on the wire is fixed, so nothing depends on what the other end
/// claims. The text may be truncated; the fingerprint covers all of it.
struct Announcement {
  static constexpr int64_t kBytes = 512;

  static Announcement of(const std::vector<at::Tensor>& tensors, int64_t bytes,
                         int64_t chunk_bytes);
  /// Throws LaneError if the bytes are not an announcement of this version.
  static Announcement decode(const at::Tensor& bytes);
  at::Tensor encode() const;

  bool matches(const Announcement& other) const {
    return fingerprint == other.fingerprint && bytes == other.bytes &&
           chunk_bytes == other.chunk_bytes;
  }
  /// "float32[4, 8] (128 bytes)"
  std::string to_string() const;

  uint64_t fingerprint = 0;
  int64_t bytes = 0;
  int64_t chunk_bytes = 0;
  bool matches_leader = true;  // set by a receiving leader when it broadcasts the sender's
  std::string text;
};

}  // namespace ldt
