// Decodes a whole message from untrusted bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "metadata/format/message.h"
#include "metadata/format/plans.h"

namespace ldt::metadata {

/// The content of a message, and the plans to rebuild its tensors one after the other in a buffer
/// of `bytes` bytes, each at a multiple of kAlignment.
struct Decoded {
  Content content;
  Plans plans;
  std::vector<int64_t> offsets;  // of each tensor, counted through all microbatches
  int64_t bytes = 0;
};
constexpr int64_t kAlignment = 64;

/// Throws MetadataError for anything but a message of this version: truncated, followed by more
/// bytes, of another version, with impossible figures, or with more than `max_elements` elements.
/// Never reads past `size`; allocates in proportion to `size` and `max_elements`.
Decoded decode(const uint8_t* data, size_t size, int64_t max_elements);

}  // namespace ldt::metadata
