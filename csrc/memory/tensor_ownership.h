// Whether anything else refers to a tensor's memory, and whether it was written to.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/torch_private.h"

namespace ldt {

using MaybeTensors = std::vector<std::optional<at::Tensor>>;

/// Whether torch allocated the memory of each tensor and no other tensor or storage refers to it.
/// False where that is unknown: for tensors without strides and for wrappers of other tensors.
bool is_memory_own(const MaybeTensors& tensors);

/// A snapshot of the tensors' version counters (torch.Tensor._version). Keeps no tensor memory
/// alive. Writes through `.data`, and by kernels outside torch, are not counted.
class VersionCounters {
 public:
  /// Skips entries without a counter: empty ones and tensors made in inference mode.
  explicit VersionCounters(const MaybeTensors& tensors);

  /// The index of the first tensor that was written to since, if any.
  std::optional<std::size_t> first_changed() const;

 private:
  struct Entry {
    std::size_t index;
    torch_private::VersionCounter counter;
    std::uint32_t version;
  };

  std::vector<Entry> entries_;
};

}  // namespace ldt
