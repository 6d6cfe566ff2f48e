// Scans rows on demand and keeps the mask's segments for the rules.
#include "metadata/host/host_rows.h"

#include <utility>

#include "metadata/format/error.h"
#include "metadata/host/scan.h"

namespace ldt::metadata {
namespace {

bool may_follow(const Form& form, const Form& mask) {
  if (mask.name != kAttentionMask || form.name != kPositionIds) return false;
  const RowShape mask_rows = rows_of(mask);
  return mask_rows.rows > 0 && rows_of(form).length == mask_rows.length;
}

}  // namespace

std::vector<size_t> masks_to_follow(const Content& content) {
  std::vector<size_t> masks;
  masks.reserve(content.form_numbers.size());
  for (const Microbatch& microbatch : content.microbatches) {
    const size_t first = masks.size();  // in ascending order of names: the mask, if any
    const std::span<const uint32_t> forms = content.forms_of(microbatch);
    for (const uint32_t number : forms) {
      const Form& form = content.forms[number];
      const Form& first_form = content.forms[forms[0]];
      masks.push_back(may_follow(form, first_form) ? first : kNoTensor);
    }
  }
  return masks;
}

HostRows::HostRows(const Content& content, std::vector<const void*> data) {
  const std::vector<size_t> masks = masks_to_follow(content);
  followed_.resize(masks.size());
  tensors_.reserve(masks.size());
  for (size_t tensor = 0; tensor < masks.size(); ++tensor) {
    const Form& form = content.forms[content.form_numbers[tensor]];
    if (masks[tensor] != kNoTensor) followed_[masks[tensor]] = true;
    tensors_.push_back(
        {&form, rows_of(form), static_cast<const uint8_t*>(data[tensor]), masks[tensor]});
  }
}

const HostRows::Tensor& HostRows::select(size_t tensor, int64_t row) {
  const Tensor& selected = tensors_[tensor];
  tensor_ = tensor;
  row_ = selected.data + row * selected.shape.length * kDTypes[selected.form->dtype].bytes;
  return selected;
}

MaskFacts HostRows::mask(size_t tensor, int64_t row) {
  const Tensor& selected = select(tensor, row);
  const int64_t length = selected.shape.length;
  const MaskFacts facts = scan_mask(row_, kDTypes[selected.form->dtype], length);
  if (!followed_[tensor]) return facts;
  mask_segments_.resize(static_cast<size_t>(selected.shape.rows));
  auto& segments = mask_segments_[static_cast<size_t>(row)];
  if (facts.ones) {
    find_segments(facts, segments);
  } else {
    find_segments(values(), length, segments);
  }
  return facts;
}

RuleFacts HostRows::rule(size_t tensor, int64_t row) {
  const Tensor& selected = select(tensor, row);
  const std::vector<Segment>* segments = nullptr;
  if (selected.mask != kNoTensor) {
    segments = &mask_segments_[static_cast<size_t>(
        mask_row_of(row, static_cast<int64_t>(mask_segments_.size())))];
  }
  return scan_rules(row_, kDTypes[selected.form->dtype], selected.shape.length, segments);
}

const int64_t* HostRows::values() {
  const Tensor& selected = tensors_[tensor_];
  const DType& type = kDTypes[selected.form->dtype];
  if (type.bytes == sizeof(int64_t)) return reinterpret_cast<const int64_t*>(row_);
  values_.resize(static_cast<size_t>(selected.shape.length));
  widen(row_, type, selected.shape.length, values_.data());
  if (type.name != "bool") return values_.data();
  for (const int64_t value : values_) {
    if (value != 0 && value != 1) {
      fail(describe(*selected.form), " holds a byte ", value,
           ", and a bool is 0 or 1; do not make it as a view of other data");
    }
  }
  return values_.data();
}

}  // namespace ldt::metadata
