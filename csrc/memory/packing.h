// Which tensors of a message are sent as one block.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ldt {

/// The tensors of a message that are sent as one contiguous block.
///
/// Packing bounds the number of transfers per message. Every transfer takes a few entries of a
/// stream's finite queue, and a host that fills the queue blocks in the driver, possibly before it
/// launches what its peer waits for. Both ends and all members of a stage know the sizes and
/// compute the same packing.
struct Packing {
  static constexpr int64_t kAlignment = 256;  // libraries pick kernels by alignment
  static constexpr int64_t kSmallBytes = 64 << 10;
  static constexpr size_t kMaxTransfers = 16;  // of one message, on a device with streams

  /// Packs the small tensors and, on a device with streams, as many of the next smallest as needed
  /// to stay within kMaxTransfers. `bytes` has one size per tensor.
  static Packing of(const std::vector<int64_t>& bytes, c10::Device device);

  std::vector<size_t> members;   // indices in message order: none, or two or more
  std::vector<int64_t> offsets;  // of each member in the block
  int64_t bytes = 0;             // size of the block
  bool has_gaps = false;         // padding between members
};

}  // namespace ldt
