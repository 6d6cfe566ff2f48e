// What a message says, as plain values: the figures of a step, and views of its metadata tensors.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "metadata/format/format.h"

namespace ldt::metadata {

/// One tensor of a hop. `order` is its dimensions from the outermost in memory to the innermost,
/// empty for the usual order; `shard` the one that is split over the ranks of a stage.
struct HopTensor {
  uint8_t dtype = 0;
  bool requires_grad = false;
  std::vector<int64_t> shape;
  std::vector<uint8_t> order;
  std::optional<uint8_t> shard;

  auto operator<=>(const HopTensor&) const = default;
};
using Hop = std::vector<HopTensor>;

/// Name, type and shape of a metadata tensor.
struct Form {
  uint8_t name = 0;
  uint8_t dtype = 0;
  std::vector<int64_t> shape;

  bool operator==(const Form&) const = default;
};

/// What the edge says about the call as a whole. Of a step that is called off only
/// `error_type` and `error_text` count.
struct Call {
  Kind kind = Kind::kStep;
  std::string plan;
  std::string setting;
  std::optional<std::string> autocast;
  std::string error_type;
  std::string error_text;
};

/// A stretch of a list that all microbatches share: a step has a hundred microbatches, and a list
/// for each is an allocation for each.
struct Part {
  size_t begin = 0;
  size_t count = 0;
};

struct Microbatch {
  int64_t id = 0;
  Part hops;   // of Content::hop_numbers
  Part forms;  // of Content::form_numbers: one tensor each, by ascending name
};

/// All of a message but the values of its tensors. Tensors are counted through all microbatches.
struct Content {
  Call call;
  std::vector<Hop> hops;  // each once, however many microbatches have it
  std::vector<Form> forms;
  std::vector<Microbatch> microbatches;
  std::vector<uint32_t> hop_numbers;   // in `hops`, microbatch by microbatch
  std::vector<uint32_t> form_numbers;  // in `forms`, likewise: one for each tensor

  std::span<const uint32_t> hops_of(const Microbatch& microbatch) const {
    return std::span(hop_numbers).subspan(microbatch.hops.begin, microbatch.hops.count);
  }
  std::span<const uint32_t> forms_of(const Microbatch& microbatch) const {
    return std::span(form_numbers).subspan(microbatch.forms.begin, microbatch.forms.count);
  }
};

/// How a tensor splits into rows: the last dimension is a row, a scalar is a row of one. A tensor
/// without elements has no rows.
struct RowShape {
  int64_t rows = 0;
  int64_t length = 0;
};
RowShape rows_of(const Form& form);

/// Throw MetadataError for what no message may hold: a form whose data type or dimensions are not
/// those of its name, a tensor of a hop whose order is not one of its dimensions.
void check_form(const Form& form);
void check_hop(const HopTensor& tensor);

/// Adds up the elements that a message asks for.
class ElementBudget {
 public:
  explicit ElementBudget(int64_t limit) : limit_(limit) {}
  /// Throws MetadataError once there are more than the limit. A size of 0 counts as 1: strides are
  /// made of the others.
  void spend(const Form& form);
  /// `what` names what asks for them.
  void spend(int64_t elements, const std::string& what);

 private:
  [[noreturn]] void refuse(const std::string& what) const;

  int64_t limit_;
  int64_t spent_ = 0;
};

/// "attention_mask: int64[4, 4096]".
std::string describe(const Form& form);

}  // namespace ldt::metadata
