// ldt._C's unpack_message: from messages to Python's values. ldt/runtime/step/metadata.py gives
// them their types.
#include "bindings/bindings.h"
#include "bindings/metadata_names.h"
#include "bindings/torch_python.h"
#include "metadata/device/device_scan.h"
#include "metadata/torch_types.h"
#include "metadata/unpack.h"

namespace py = pybind11;

namespace ldt {
namespace {

using metadata::Call;
using metadata::Hop;
using metadata::HopTensor;
using metadata::Kind;

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
py::object new_microbatch(const py::type& type, const MetadataNames& names, int64_t id,
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

// Moved, since another reference to a tensor that Python has takes the GIL once more.
void set_tensor(const py::dict& tensors, const py::str& name, at::Tensor&& tensor) {
  const auto value = torch_private::to_python(std::move(tensor));
  if (!value || PyDict_SetItem(tensors.ptr(), name.ptr(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

py::tuple microbatches_to_python(metadata::Unpacked& unpacked, const py::object& spec_type,
                                 const py::type& microbatch_type) {
  const auto& content = unpacked.content;
  std::vector<py::tuple> hops;
  for (const Hop& hop : content.hops) hops.push_back(specs_to_python(hop, spec_type));
  const MetadataNames& names = MetadataNames::get();
  py::tuple microbatches(content.microbatches.size());
  size_t tensor = 0;
  for (size_t index = 0; index < content.microbatches.size(); ++index) {
    const auto& microbatch = content.microbatches[index];
    py::dict tensors;
    for (const uint32_t form : content.forms_of(microbatch)) {
      set_tensor(tensors, names.of_tensors[content.forms[form].name],
                 std::move(unpacked.tensors[tensor++]));
    }
    const auto numbers = content.hops_of(microbatch);
    py::tuple own_hops(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) own_hops[i] = hops[numbers[i]];
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
  module.def("unpack_message", &unpack_message, py::arg("data"), py::kw_only(), py::arg("device"),
             py::arg("max_elements"), py::arg("spec_type"), py::arg("microbatch_type"));
  module.def("has_metadata_kernels", &metadata::has_kernels, py::arg("device"));
  module.attr("MAX_METADATA_ELEMENTS") = metadata::kDefaultMaxElements;
  py::list names;
  for (const auto& name : metadata::kNames) names.append(std::string(name.text));
  module.attr("METADATA_NAMES") = py::tuple(names);
}

}  // namespace ldt
