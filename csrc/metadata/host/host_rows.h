// Facts about rows in host memory.
#pragma once

#include <vector>

#include "metadata/format/message.h"
#include "metadata/format/row_source.h"

namespace ldt::metadata {

constexpr size_t kNoTensor = SIZE_MAX;

/// For each tensor of the content, the mask that its rows may follow, or kNoTensor. Only
/// position_ids follow a mask, and only one with rows of the same length.
std::vector<size_t> masks_to_follow(const Content& content);

/// Scans contiguous tensors on the host. `data` has a pointer per tensor, through all microbatches;
/// it and `content` must outlive this object.
class HostRows : public RowFactsSource {
 public:
  HostRows(const Content& content, std::vector<const void*> data);

  MaskFacts mask(size_t tensor, int64_t row) override;
  RuleFacts rule(size_t tensor, int64_t row) override;
  const int64_t* values() override;
  /// Makes values() return a row without scanning it.
  void select_row(size_t tensor, int64_t row) { select(tensor, row); }

 private:
  struct Tensor {
    const Form* form;
    RowShape shape;
    const uint8_t* data;
    size_t mask;
  };
  const Tensor& select(size_t tensor, int64_t row);

  std::vector<Tensor> tensors_;
  std::vector<bool> followed_;                       // a tensor may follow this mask
  std::vector<std::vector<Segment>> mask_segments_;  // of the last such mask, row by row
  std::vector<int64_t> values_;
  size_t tensor_ = 0;  // of the last row
  const uint8_t* row_ = nullptr;
};

}  // namespace ldt::metadata
