// Collects the tensors, scans their rows and encodes.
#include "metadata/pack.h"

#include <algorithm>
#include <array>
#include <map>
#include <span>

#include "common/tensor_info.h"
#include "metadata/codec/encoder.h"
#include "metadata/device/device_rows.h"
#include "metadata/format/error.h"
#include "metadata/host/host_rows.h"
#include "metadata/torch_types.h"

namespace ldt::metadata {
namespace {

// Collects forms, each once, and the tensors in the order of the wire.
class Collector {
 public:
  Collector(Content& content, size_t tensors, int64_t max_elements)
      : content_(content), budget_(max_elements) {
    last_form_.fill(UINT32_MAX);
    tensors_.reserve(tensors);
    content_.form_numbers.reserve(tensors);
  }

  // Takes the tensors of one microbatch in any order.
  void add(int64_t id, std::span<NamedTensor> tensors) {
    for (const NamedTensor& one : tensors) {
      const auto title = [&] { return title_of_tensor(id, kNames[one.name].text); };
      with_title(title, [&] { check(one); });
    }
    std::sort(
        tensors.begin(), tensors.end(),
        [](const NamedTensor& left, const NamedTensor& right) { return left.name < right.name; });
    for (const NamedTensor& one : tensors) {
      const uint32_t form = number_of(one);
      content_.form_numbers.push_back(form);
      budget_.spend(content_.forms[form]);  // before an expanded tensor is made contiguous
      tensors_.push_back(one.tensor->expect_contiguous());
    }
  }

  Tensors take() { return std::move(tensors_); }

 private:
  void check(const NamedTensor& named) const {
    if (!is_sendable(*named.tensor)) {
      fail("expected a plain, dense, strided tensor; convert it, or leave it out");
    }
    if (!is_like_the_last(named)) check_form(form_of(named));
  }

  static Form form_of(const NamedTensor& named) {
    return {named.name, wire_dtype(named.tensor->scalar_type()), named.tensor->sizes().vec()};
  }

  // Whether the last tensor of this name had the same form: mostly so.
  bool is_like_the_last(const NamedTensor& named) const {
    const uint32_t last = last_form_[named.name];
    return last < content_.forms.size() &&
           content_.forms[last].dtype == wire_dtype(named.tensor->scalar_type()) &&
           named.tensor->sizes() == content_.forms[last].shape;
  }

  uint32_t number_of(const NamedTensor& named) {
    uint32_t& last = last_form_[named.name];
    if (is_like_the_last(named)) return last;
    Form form = form_of(named);
    std::vector<int64_t> key = form.shape;
    key.push_back(form.name << 8 | form.dtype);
    const auto next = static_cast<uint32_t>(content_.forms.size());
    const auto [found, is_new] = numbers_.emplace(std::move(key), next);
    if (is_new) content_.forms.push_back(std::move(form));
    return last = found->second;
  }

  Content& content_;
  ElementBudget budget_;
  std::map<std::vector<int64_t>, uint32_t> numbers_;
  std::array<uint32_t, kNames.size()> last_form_;
  Tensors tensors_;
};

at::Tensor to_tensor(const std::vector<uint8_t>& bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), tensor.data_ptr<uint8_t>());
  return tensor;
}

}  // namespace

uint8_t name_number(std::string_view name) {
  const auto found = std::find_if(kNames.begin(), kNames.end(),
                                  [name](const Name& known) { return known.text == name; });
  if (found != kNames.end()) return static_cast<uint8_t>(found - kNames.begin());
  std::string known;
  for (const Name& one : kNames) known += (known.empty() ? "" : ", ") + std::string(one.text);
  fail("'", name, "' may not leave the edge: expected one of ", known,
       "; use it in chunks of the edge only");
}

std::string title_of_tensor(int64_t microbatch, std::string_view name) {
  return "microbatch " + std::to_string(microbatch) + ", tensor '" + std::string(name) + "'";
}

at::Tensor pack(Content content, std::vector<NamedTensor> named, int64_t max_elements) {
  Collector collector(content, named.size(), max_elements);
  for (const Microbatch& microbatch : content.microbatches) {
    const auto [begin, count] = microbatch.forms;
    collector.add(microbatch.id, std::span(named).subspan(begin, count));
  }
  const Tensors tensors = collector.take();
  const bool on_host = std::all_of(tensors.begin(), tensors.end(),
                                   [](const auto& tensor) { return tensor->is_cpu(); });
  if (!on_host) {
    const auto rows = scan_on_device(content, tensors);
    return to_tensor(encode(content, *rows, max_elements));
  }
  std::vector<const void*> data;
  data.reserve(tensors.size());
  for (const auto& tensor : tensors) data.push_back(tensor->const_data_ptr());
  HostRows rows(content, std::move(data));
  return to_tensor(encode(content, rows, max_elements));
}

}  // namespace ldt::metadata
