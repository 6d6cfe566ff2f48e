// What both ends of a lane tell each other before a payload moves, so that a mismatch is an error
// and not garbage.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace ldt {

/// A message as one side sees it. Both sides send theirs and compare: no round trip is added to a
/// receive that was posted in time. Travels as a fixed number of bytes, so nothing depends on
/// what the other side claims. The text may be cut; the fingerprint is of the whole.
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
  bool matches_leader =
      true;  // said by a receiving leader to its stage, of the sender's announcement
  std::string text;
};

}  // namespace ldt
