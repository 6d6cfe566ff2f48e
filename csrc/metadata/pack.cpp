// From the tensors of a step to its message.
#include <algorithm>
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
  Collector(Content& content, int64_t max_elements) : content_(content), budget_(max_elements) {}

  void add(const TensorMicrobatch& source) {
    std::vector<std::pair<Form, const at::Tensor*>> tensors;
    for (const auto& [name, tensor] : source.tensors) {
      const auto title = [&source, &name = name] {
        return "microbatch " + std::to_string(source.id) + ", tensor '" + name + "'";
      };
      with_title(title, [&, &name = name, &tensor = tensor] {
        tensors.emplace_back(form_of(name, tensor), &tensor);
      });
    }
    std::sort(tensors.begin(), tensors.end(), [](const auto& left, const auto& right) {
      return left.first.name < right.first.name;
    });
    Microbatch microbatch{source.id, source.hops, {}};
    for (const auto& [form, tensor] : tensors) {
      microbatch.forms.push_back(number_of(form));
      budget_.spend(form);  // before an expanded tensor is made contiguous
      tensors_.push_back(tensor->contiguous());
    }
    content_.microbatches.push_back(std::move(microbatch));
  }

  std::vector<at::Tensor> take() { return std::move(tensors_); }

 private:
  static Form form_of(const std::string& name, const at::Tensor& tensor) {
    const uint8_t number = name_number(name);
    if (!travels(tensor)) {
      fail("expected a plain, dense, strided tensor; convert it, or leave it out");
    }
    Form form{number, wire_dtype(tensor.scalar_type()), tensor.sizes().vec()};
    check_form(form);
    return form;
  }

  uint32_t number_of(const Form& form) {
    std::vector<int64_t> key = form.shape;
    key.push_back(form.name << 8 | form.dtype);
    const auto next = static_cast<uint32_t>(content_.forms.size());
    const auto [found, is_new] = numbers_.emplace(std::move(key), next);
    if (is_new) content_.forms.push_back(form);
    return found->second;
  }

  Content& content_;
  ElementBudget budget_;
  std::map<std::vector<int64_t>, uint32_t> numbers_;
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
