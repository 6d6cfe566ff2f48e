// Which tensors of a message travel together.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ldt {

/// Tensors of a message that travel as one block, one behind the other.
///
/// Each transfer takes a few operations of a stream, whose queue is finite: a host that fills it
/// blocks in the driver, perhaps before it has launched what its peer waits for. So the number of
/// transfers is bounded, whatever the number of tensors. Both ends and all members of a stage know
/// the sizes, and compute the same.
struct Packing {
  static constexpr int64_t kAlignment = 256;  // libraries choose kernels by that of their arguments
  static constexpr int64_t kSmallBytes = 64 << 10;
  static constexpr size_t kMostTransfers = 16;  // of one message, on a device with streams

  /// `bytes` has one number for each tensor. Small ones are packed, and on a device with streams as
  /// many of the smallest others as have to be.
  static Packing of(const std::vector<int64_t>& bytes, c10::Device device);

  std::vector<size_t> members;   // in the order of the message: none, or two and more
  std::vector<int64_t> offsets;  // of each in the block
  int64_t bytes = 0;             // of the block
  bool has_gaps = false;         // between members
};

}  // namespace ldt
