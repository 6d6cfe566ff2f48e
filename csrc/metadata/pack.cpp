// From the tensors of a step to its message.
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>

#include "common/wire_tensors.h"
#include "metadata/device_rows.h"
#include "metadata/error.h"
#include "metadata/host_rows.h"
#include "metadata/tensors.h"

namespace ldt::metadata {
namespace {

uint8_t name_number(const std::string& name) {
  const auto found = std::find_if(kNames.begin(), kNames.end(),
                                  [&](const Name& known) { return known.text == name; });
  if (found != kNames.end()) return static_cast<uint8_t>(found - kNames.begin());
  std::string known;
  for (const Name& one : kNames) known += (known.empty() ? "" : ", ") + std::string(one.text);
  fail("'", name, "' may not leave the edge: expected one of ", known,
       "; use it in chunks of the edge only");
}

// Collects forms, each once, and the tensors in the order of the wire.
class Collector {
 public:
  Collector(Content& content, int64_t max_elements) : content_(content), budget_(max_elements) {
    last_form_.fill(UINT32_MAX);
  }

  void add(const TensorMicrobatch& source) {
    named_.clear();
    for (const auto& [name, tensor] : source.tensors) {
      const auto title = [&source, &name = name] {
        return "microbatch " + std::to_string(source.id) + ", tensor '" + name + "'";
      };
      with_title(title,
                 [&, &name = name, &tensor = tensor] { named_.push_back(named(name, tensor)); });
    }
    std::sort(named_.begin(), named_.end(),
              [](const Named& left, const Named& right) { return left.name < right.name; });
    Microbatch microbatch{source.id, source.hops, {}};
    microbatch.forms.reserve(named_.size());
    for (const Named& one : named_) {
      const uint32_t form = number_of(one);
      microbatch.forms.push_back(form);
      budget_.spend(content_.forms[form]);  // before an expanded tensor is made contiguous
      tensors_.push_back(one.tensor->contiguous());
    }
    content_.microbatches.push_back(std::move(microbatch));
  }

  std::vector<at::Tensor> take() { return std::move(tensors_); }

 private:
  struct Named {
    uint8_t name;
    uint8_t dtype;
    const at::Tensor* tensor;
  };

  Named named(const std::string& name, const at::Tensor& tensor) const {
    const uint8_t number = name_number(name);
    if (!travels(tensor)) {
      fail("expected a plain, dense, strided tensor; convert it, or leave it out");
    }
    const Named made{number, wire_dtype(tensor.scalar_type()), &tensor};
    if (!is_like_the_last(made)) check_form(form_of(made));
    return made;
  }

  static Form form_of(const Named& named) {
    return {named.name, named.dtype, named.tensor->sizes().vec()};
  }

  // Whether the last tensor of this name had the same form, as in most steps.
  bool is_like_the_last(const Named& named) const {
    const uint32_t last = last_form_[named.name];
    return last < content_.forms.size() && content_.forms[last].dtype == named.dtype &&
           named.tensor->sizes() == content_.forms[last].shape;
  }

  uint32_t number_of(const Named& named) {
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
  std::vector<Named> named_;  // of the microbatch at hand
  std::vector<at::Tensor> tensors_;
};

at::Tensor to_tensor(const std::vector<uint8_t>& bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), tensor.data_ptr<uint8_t>());
  return tensor;
}

}  // namespace

at::Tensor pack(Content content, const std::vector<TensorMicrobatch>& microbatches,
                int64_t max_elements) {
  Collector collector(content, max_elements);
  for (const TensorMicrobatch& microbatch : microbatches) collector.add(microbatch);
  const std::vector<at::Tensor> tensors = collector.take();
  const bool on_host = std::all_of(tensors.begin(), tensors.end(),
                                   [](const at::Tensor& tensor) { return tensor.is_cpu(); });
  if (!on_host) {
    const auto rows = scan_on_device(content, tensors);
    return to_tensor(encode(content, *rows, max_elements));
  }
  std::vector<const void*> data;
  for (const at::Tensor& tensor : tensors) data.push_back(tensor.const_data_ptr());
  HostRows rows(content, std::move(data));
  return to_tensor(encode(content, rows, max_elements));
}

}  // namespace ldt::metadata
