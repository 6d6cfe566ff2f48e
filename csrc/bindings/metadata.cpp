// ldt._C's pack and unpack: Python's values in and out of messages. ldt/runtime/metadata.py gives
// them their types.
#include <torch/csrc/autograd/python_variable.h>

#include <map>
#include <unordered_map>

#include "bindings/bindings.h"
#include "metadata/error.h"
#include "metadata/tensors.h"

namespace py = pybind11;

namespace ldt {
namespace {

using metadata::Call;
using metadata::Content;
using metadata::Hop;
using metadata::HopTensor;
using metadata::Kind;
using metadata::TensorMicrobatch;

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

  uint32_t number_of(py::handle specs) {
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

 private:
  std::vector<Hop>& hops_;
  std::unordered_map<PyObject*, uint32_t> by_object_;
  std::map<Hop, uint32_t> by_value_;
  std::vector<py::object> alive_;  // an address names an object only as long as it lives
};

// The names of MicrobatchMetadata's fields, made once a call: a string for each look-up is what
// most of the time would go into.
struct FieldNames {
  py::str id{"id"};
  py::str hops{"hops"};
  py::str tensors{"tensors"};
};

TensorMicrobatch microbatch_from(py::handle source, const FieldNames& names, HopTable& table) {
  TensorMicrobatch microbatch;
  microbatch.id = py::getattr(source, names.id).cast<int64_t>();
  const py::object hops = py::getattr(source, names.hops);
  for (const py::handle specs : hops) microbatch.hops.push_back(table.number_of(specs));
  const py::dict tensors(py::getattr(source, names.tensors));  // a dict is not copied
  microbatch.tensors.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    if (!THPVariable_Check(tensor.ptr())) {
      metadata::fail("microbatch ", microbatch.id, ": expected a tensor as '",
                     py::str(name).cast<std::string>(), "', got ",
                     py::str(py::type::of(tensor)).cast<std::string>(),
                     "; only tensors are metadata");
    }
    microbatch.tensors.emplace_back(name.cast<std::string>(), THPVariable_Unpack(tensor.ptr()));
  }
  return microbatch;
}

std::vector<TensorMicrobatch> microbatches_from(const py::sequence& microbatches,
                                                std::vector<Hop>& hops) {
  const FieldNames names;
  HopTable table(hops);
  std::vector<TensorMicrobatch> result;
  result.reserve(microbatches.size());
  for (const py::handle source : microbatches) {
    result.push_back(microbatch_from(source, names, table));
  }
  return result;
}

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
  const auto sources = microbatches_from(microbatches, content.hops);
  py::gil_scoped_release no_gil;
  return metadata::pack(std::move(content), sources, max_elements);
}

at::Tensor pack_called_off(std::string error_type, std::string error_text) {
  Content content;
  content.call.kind = Kind::kCalledOff;
  content.call.error_type = std::move(error_type);
  content.call.error_text = std::move(error_text);
  py::gil_scoped_release no_gil;
  return metadata::pack(std::move(content), {}, 0);
}

py::tuple specs_to_python(const Hop& hop, const py::object& spec_type) {
  py::tuple specs(hop.size());
  for (size_t index = 0; index < hop.size(); ++index) {
    const HopTensor& tensor = hop[index];
    const std::vector<int64_t> order(tensor.order.begin(), tensor.order.end());
    specs[index] = spec_type(py::tuple(py::cast(tensor.shape)), metadata::torch_dtype(tensor.dtype),
                             tensor.requires_grad, py::tuple(py::cast(order)), tensor.shard);
  }
  return specs;
}

// An object of a frozen dataclass, made as its own __init__ does it but without a Python frame: a
// step has 64 of them.
py::object new_microbatch(const py::type& type, const FieldNames& names, int64_t id,
                          const py::tuple& hops, const py::dict& tensors) {
  static const auto new_object = reinterpret_cast<PyTypeObject*>(&PyBaseObject_Type)->tp_new;
  const py::tuple nothing;
  auto made = py::reinterpret_steal<py::object>(
      new_object(reinterpret_cast<PyTypeObject*>(type.ptr()), nothing.ptr(), nullptr));
  if (!made) throw py::error_already_set();
  const auto set = [&made](const py::str& name, const py::object& value) {
    if (PyObject_GenericSetAttr(made.ptr(), name.ptr(), value.ptr()) != 0) {
      throw py::error_already_set();
    }
  };
  set(names.id, py::int_(id));
  set(names.hops, hops);
  set(names.tensors, tensors);
  return made;
}

py::tuple microbatches_to_python(const metadata::Unpacked& unpacked, const py::object& spec_type,
                                 const py::type& microbatch_type) {
  const auto& content = unpacked.content;
  std::vector<py::str> tensor_names;
  for (const auto& name : metadata::kNames) tensor_names.emplace_back(std::string(name.text));
  std::vector<py::tuple> hops;
  for (const Hop& hop : content.hops) hops.push_back(specs_to_python(hop, spec_type));
  const FieldNames names;
  py::tuple microbatches(content.microbatches.size());
  size_t tensor = 0;
  for (size_t index = 0; index < content.microbatches.size(); ++index) {
    const auto& microbatch = content.microbatches[index];
    py::dict tensors;
    for (const uint32_t form : microbatch.forms) {
      tensors[tensor_names[content.forms[form].name]] = unpacked.tensors[tensor++];
    }
    py::tuple own_hops(microbatch.hops.size());
    for (size_t i = 0; i < microbatch.hops.size(); ++i) own_hops[i] = hops[microbatch.hops[i]];
    microbatches[index] = new_microbatch(microbatch_type, names, microbatch.id, own_hops, tensors);
  }
  return microbatches;
}

py::tuple unpack_message(const at::Tensor& data, c10::Device device, int64_t max_elements,
                         const py::object& spec_type, const py::type& microbatch_type) {
  metadata::Unpacked unpacked;
  {
    py::gil_scoped_release no_gil;
    unpacked = metadata::unpack(data, device, max_elements);
  }
  const Call& call = unpacked.content.call;
  if (call.kind == Kind::kCalledOff) {
    return py::make_tuple(py::none(), call.error_type, call.error_text);
  }
  return py::make_tuple(call.kind == Kind::kStep ? "step" : "eval", call.plan, call.setting,
                        call.autocast,
                        microbatches_to_python(unpacked, spec_type, microbatch_type));
}

}  // namespace

void bind_metadata(py::module_& module) {
  module.def("pack_step", &pack_step, py::kw_only(), py::arg("training"), py::arg("plan"),
             py::arg("setting"), py::arg("autocast").none(true), py::arg("microbatches"),
             py::arg("max_elements"));
  module.def("pack_called_off", &pack_called_off, py::kw_only(), py::arg("error_type"),
             py::arg("error_text"));
  module.def("unpack_message", &unpack_message, py::arg("data"), py::kw_only(), py::arg("device"),
             py::arg("max_elements"), py::arg("spec_type"), py::arg("microbatch_type"));
  module.def("has_metadata_kernels", &metadata::has_kernels, py::arg("device"));
  module.attr("MAX_METADATA_ELEMENTS") = metadata::kDefaultMaxElements;
  py::list names;
  for (const auto& name : metadata::kNames) names.append(std::string(name.text));
  module.attr("METADATA_NAMES") = py::tuple(names);
}

}  // namespace ldt
