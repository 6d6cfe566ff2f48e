// The content of a message as plain values.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "metadata/format/format.h"

namespace ldt::metadata {

/// One tensor of a hop. `order` lists its dimensions from the outermost in memory to the innermost,
/// empty if contiguous; `shard` is the dimension that is split over the ranks of a stage.
struct HopTensor {
  uint8_t dtype = 0;
  bool requires_grad = false;
  std::vector<int64_t> shape;
  std::vector<uint8_t> order;
  std::optional<uint8_t> shard;

  auto operator<=>(const HopTensor&) const = default;
};
using Hop = std::vector<HopTensor>;

/// The name, type and shape of a metadata tensor.
struct Form {
  uint8_t name = 0;
  uint8_t dtype = 0;
  std::vector<int64_t> shape;

  bool operator==(const Form&) const = default;
};

/// What holds for the call as a whole. A step that is called off has only `error_type` and
/// `error_text`.
struct Call {
  Kind kind = Kind::kStep;
  std::string plan;
  std::string setting;
  std::optional<std::string> autocast;
  std::string error_type;
  std::string error_text;
};

/// A range of a list that all microbatches share, which saves an allocation for each of them.
struct Part {
  size_t begin = 0;
  size_t count = 0;
};

struct Microbatch {
  int64_t id = 0;
  Part hops;   // of Content::hop_numbers
  Part forms;  // of Content::form_numbers: one tensor each, by ascending name
};

/// A message without the values of its tensors, which are numbered through all microbatches.
struct Content {
  Call call;
  std::vector<Hop> hops;  // distinct ones
  std::vector<Form> forms;
  std::vector<Microbatch> microbatches;
  std::vector<uint32_t> hop_numbers;   // indices in `hops`, microbatch by microbatch
  std::vector<uint32_t> form_numbers;  // indices in `forms`, one per tensor

  std::span<const uint32_t> hops_of(const Microbatch& microbatch) const {
    return std::span(hop_numbers).subspan(microbatch.hops.begin, microbatch.hops.count);
  }
  std::span<const uint32_t> forms_of(const Microbatch& microbatch) const {
    return std::span(form_numbers).subspan(microbatch.forms.begin, microbatch.forms.count);
  }
};

/// A tensor's rows: the last dimension is a row, a scalar is a row of one element, and an empty
/// tensor has no rows.
struct RowShape {
  int64_t rows = 0;
  int64_t length = 0;
};
RowShape rows_of(const Form& form);

/// Throw MetadataError for a form whose dtype or dimensions do not fit its name, and for a hop's
/// tensor whose order is no permutation of its dimensions.
void check_form(const Form& form);
void check_hop(const HopTensor& tensor);

/// Counts the elements that a message asks for.
class ElementBudget {
 public:
  explicit ElementBudget(int64_t limit) : limit_(limit) {}
  /// Throws MetadataError beyond the limit. A size of 0 counts as 1, as strides are products of the
  /// other sizes.
  void spend(const Form& form);
  /// `what` names the item that asks for them.
  void spend(int64_t elements, const std::string& what);

 private:
  [[noreturn]] void refuse(const std::string& what) const;

  int64_t limit_;
  int64_t spent_ = 0;
};

/// "attention_mask: int64[4, 4096]".
std::string describe(const Form& form);

}  // namespace ldt::metadata
