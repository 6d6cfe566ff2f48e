// ldt._C's pack_step and pack_called_off: from Python's values to messages.
#include <map>
#include <unordered_map>

#include "bindings/bindings.h"
#include "bindings/metadata_names.h"
#include "bindings/torch_python.h"
#include "metadata/format/error.h"
#include "metadata/pack.h"
#include "metadata/torch_types.h"

namespace py = pybind11;

namespace ldt {
namespace {

using metadata::Content;
using metadata::Hop;
using metadata::HopTensor;
using metadata::Kind;
using metadata::NamedTensor;

HopTensor hop_tensor_from(py::handle spec) {
  HopTensor tensor;
  tensor.dtype = metadata::wire_dtype(spec.attr("dtype").cast<at::ScalarType>());
  tensor.requires_grad = spec.attr("requires_grad").cast<bool>();
  tensor.shape = spec.attr("shape").cast<std::vector<int64_t>>();
  tensor.order = spec.attr("order").cast<std::vector<uint8_t>>();
  tensor.shard = spec.attr("shard").cast<std::optional<uint8_t>>();
  return tensor;
}

// Numbers hops as they come. Most steps have few of them, and often as one object.
class HopTable {
 public:
  explicit HopTable(std::vector<Hop>& hops) : hops_(hops) {}

  // `specs` is hop `place` of its microbatch: mostly the very object that it was in the one before.
  uint32_t number_of(py::handle specs, size_t place) {
    if (place >= last_.size()) last_.resize(place + 1);
    Known& last = last_[place];
    if (!specs.is(last.specs)) last = {specs, number_of_object(specs)};
    return last.number;
  }

 private:
  struct Known {
    py::handle specs;
    uint32_t number = 0;
  };

  uint32_t number_of_object(py::handle specs) {
    const auto known = by_object_.find(specs.ptr());
    if (known != by_object_.end()) return known->second;
    Hop hop;
    for (const py::handle spec : specs) hop.push_back(hop_tensor_from(spec));
    const auto next = static_cast<uint32_t>(hops_.size());
    const auto [found, is_new] = by_value_.emplace(hop, next);
    if (is_new) hops_.push_back(std::move(hop));
    alive_.push_back(py::reinterpret_borrow<py::object>(specs));
    by_object_.emplace(specs.ptr(), found->second);
    return found->second;
  }

  std::vector<Hop>& hops_;
  std::vector<Known> last_;  // by place
  std::unordered_map<PyObject*, uint32_t> by_object_;
  std::map<Hop, uint32_t> by_value_;
  std::vector<py::object> alive_;  // an address names an object only as long as it lives
};

// Reads a step's microbatches with few allocations, and without a reference to any at::Tensor: see
// NamedTensor.
class MicrobatchReader {
 public:
  MicrobatchReader(Content& content, size_t microbatches)
      : content_(content), table_(content.hops) {
    content_.microbatches.reserve(microbatches);
    content_.hop_numbers.reserve(microbatches);
    const size_t usual = 2 * microbatches;  // mask and positions
    tensors.reserve(usual);
    alive_.reserve(usual);
  }

  void read(py::handle source) {
    metadata::Microbatch& microbatch = content_.microbatches.emplace_back();
    microbatch.id = py::getattr(source, names_.id).cast<int64_t>();
    microbatch.hops = read_hops(py::tuple(py::getattr(source, names_.hops)));
    microbatch.forms.begin = tensors.size();
    const py::dict own(py::getattr(source, names_.tensors));  // a dict is not copied
    for (const auto& [name, tensor] : own) read_tensor(microbatch.id, name, tensor);
    microbatch.forms.count = tensors.size() - microbatch.forms.begin;
  }

  std::vector<NamedTensor> tensors;

 private:
  metadata::Part read_hops(const py::tuple& hops) {
    const size_t begin = content_.hop_numbers.size();
    size_t place = 0;
    for (const py::handle specs : hops) {
      content_.hop_numbers.push_back(table_.number_of(specs, place++));
    }
    return {begin, place};
  }

  void read_tensor(int64_t microbatch, py::handle name, py::handle tensor) {
    if (!torch_private::is_tensor(tensor)) {
      metadata::fail("microbatch ", microbatch, ": expected a tensor as '",
                     py::str(name).cast<std::string>(), "', got ",
                     py::str(py::type::of(tensor)).cast<std::string>(),
                     "; only tensors are metadata");
    }
    tensors.push_back({number_of_name(microbatch, name), &torch_private::tensor_of(tensor)});
    alive_.push_back(py::reinterpret_borrow<py::object>(tensor));
  }

  uint8_t number_of_name(int64_t microbatch, py::handle name) const {
    for (size_t number = 0; number < names_.of_tensors.size(); ++number) {
      if (name.is(names_.of_tensors[number])) return static_cast<uint8_t>(number);
    }
    const auto text = name.cast<std::string>();  // of an equal string, or of none that may cross
    return metadata::with_title([&] { return metadata::title_of_tensor(microbatch, text); },
                                [&] { return metadata::name_number(text); });
  }

  const MetadataNames& names_ = MetadataNames::get();
  Content& content_;
  HopTable table_;
  std::vector<py::object> alive_;  // the owners of `tensors`, whatever becomes of their dicts
};

at::Tensor pack_step(bool training, std::string plan, std::string setting,
                     std::optional<std::string> autocast, const py::sequence& microbatches,
                     int64_t max_elements) {
  Content content;
  content.call = {training ? Kind::kStep : Kind::kEval,
                  std::move(plan),
                  std::move(setting),
                  std::move(autocast),
                  {},
                  {}};
  MicrobatchReader reader(content, microbatches.size());
  for (const py::handle source : microbatches) reader.read(source);
  py::gil_scoped_release no_gil;
  return metadata::pack(std::move(content), std::move(reader.tensors), max_elements);
}

at::Tensor pack_called_off(std::string error_type, std::string error_text) {
  Content content;
  content.call.kind = Kind::kCalledOff;
  content.call.error_type = std::move(error_type);
  content.call.error_text = std::move(error_text);
  py::gil_scoped_release no_gil;
  return metadata::pack(std::move(content), {}, 0);
}

}  // namespace

void bind_metadata_pack(py::module_& module) {
  module.def("pack_step", &pack_step, py::kw_only(), py::arg("training"), py::arg("plan"),
             py::arg("setting"), py::arg("autocast").none(true), py::arg("microbatches"),
             py::arg("max_elements"));
  module.def("pack_called_off", &pack_called_off, py::kw_only(), py::arg("error_type"),
             py::arg("error_text"));
}

}  // namespace ldt
