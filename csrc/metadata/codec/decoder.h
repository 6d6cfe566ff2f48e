// Reads a whole message out of untrusted bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "metadata/format/message.h"
#include "metadata/format/plans.h"

namespace ldt::metadata {

/// All that a message says, and how its tensors are rebuilt: one after the other in one buffer of
/// `bytes` bytes, each from a multiple of kAlignment on.
struct Decoded {
  Content content;
  Plans plans;
  std::vector<int64_t> offsets;  // of each tensor, counted through all microbatches
  int64_t bytes = 0;
};
constexpr int64_t kAlignment = 64;

/// Throws MetadataError for whatever is no message of this version: cut short, followed by more
/// bytes, of another version, with figures that cannot be, or with more than `max_elements`
/// elements. Reads nothing past `size`; allocates in proportion to `size` and `max_elements`.
Decoded decode(const uint8_t* data, size_t size, int64_t max_elements);

}  // namespace ldt::metadata
