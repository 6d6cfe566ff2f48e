// Checks shapes, names and orders, for both writing and reading.
#include "metadata/format/message.h"

#include <limits>

#include "metadata/format/error.h"

namespace ldt::metadata {
namespace {

// The product of all sizes, with 0 taken as 1; empty if it exceeds `limit`.
std::optional<int64_t> product_up_to(const std::vector<int64_t>& shape, int64_t limit) {
  int64_t product = 1;
  for (const int64_t size : shape) {
    if (size <= 1) continue;
    if (__builtin_mul_overflow(product, size, &product) || product > limit) return std::nullopt;
  }
  return product;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(shape[dim]);
  }
  return text + "]";
}

void check_sizes(const std::vector<int64_t>& shape) {
  if (shape.size() > kMaxDims) {
    fail("expected at most ", kMaxDims, " dimensions, got ", shape.size());
  }
  for (const int64_t size : shape) {
    if (size < 0) fail("expected sizes of 0 or more, got ", shape_text(shape));
  }
}

}  // namespace

RowShape rows_of(const Form& form) {
  RowShape shape{1, form.shape.empty() ? 1 : form.shape.back()};
  for (size_t dim = 0; dim + 1 < form.shape.size(); ++dim) shape.rows *= form.shape[dim];
  if (shape.length == 0) shape.rows = 0;
  return shape;
}

std::string describe(const Form& form) {
  return std::string(kNames[form.name].text) + ": " + std::string(kDTypes[form.dtype].name) +
         shape_text(form.shape);
}

void check_form(const Form& form) {
  if (form.name >= kNames.size()) {
    fail("expected the number of a tensor name below ", kNames.size(), ", got ", int{form.name},
         "; use the same version of ldt on all ranks");
  }
  const Name& name = kNames[form.name];
  if (form.dtype >= kDTypes.size() || !kDTypes[form.dtype].integer) {
    fail("expected ", name.text, " of a bool or integer type, got ",
         form.dtype < kDTypes.size() ? kDTypes[form.dtype].name : "an unknown one",
         "; convert it, or keep it out of the metadata");
  }
  check_sizes(form.shape);
  const size_t dims = form.shape.size();
  const bool last_fits = name.last_size < 0 || (dims > 0 && form.shape.back() == name.last_size);
  if (dims < name.min_dims || dims > name.max_dims || !last_fits) {
    fail("expected ", name.text, " of ", int{name.min_dims}, " to ", int{name.max_dims},
         " dimensions", name.last_size < 0 ? "" : ", the last of size 3", ", got ", describe(form));
  }
}

void check_hop(const HopTensor& tensor) {
  if (tensor.dtype >= kDTypes.size()) {
    fail("expected the number of a data type below ", kDTypes.size(), ", got ", int{tensor.dtype},
         "; use the same version of ldt on all ranks");
  }
  check_sizes(tensor.shape);
  const int64_t most = std::numeric_limits<int64_t>::max() / kDTypes[tensor.dtype].bytes;
  if (!product_up_to(tensor.shape, most)) {
    fail("expected fewer than 2^63 bytes, got a tensor of shape ", shape_text(tensor.shape));
  }
  if (tensor.shard && (*tensor.shard >= tensor.shape.size() || !tensor.order.empty())) {
    fail("expected a split dimension below ", tensor.shape.size(), " and the usual order, got ",
         int{*tensor.shard}, " and an order of ", tensor.order.size());
  }
  if (tensor.order.empty()) return;
  uint64_t seen = 0;
  for (const uint8_t dim : tensor.order) seen |= dim < kMaxDims ? uint64_t{1} << dim : 0;
  const size_t dims = tensor.shape.size();
  const uint64_t all = dims == kMaxDims ? ~uint64_t{0} : (uint64_t{1} << dims) - 1;
  if (tensor.order.size() != dims || seen != all) {
    fail("expected a memory order that names each of ", dims, " dimensions once");
  }
}

void ElementBudget::spend(const Form& form) {
  const auto elements = product_up_to(form.shape, limit_);
  if (elements && *elements <= limit_ - spent_) {
    spent_ += *elements;
  } else {
    refuse(describe(form));
  }
}

void ElementBudget::spend(int64_t elements, const std::string& what) {
  if (elements > limit_ - spent_) refuse(what);
  spent_ += elements;
}

void ElementBudget::refuse(const std::string& what) const {
  fail(what, " asks for more than the ", limit_,
       " elements that the metadata of one step may have; if that is meant, raise max_elements on "
       "all ranks");
}

}  // namespace ldt::metadata
