// Packing of tensors that cross a slow link.
#include "compression/pack.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace ldt {

void bind_compression(py::module_& module) {
  module.def("has_8bit_kernels", &compression::has_kernels, py::arg("device"));
  module.def("pack_8bit", &compression::pack_8bit, py::arg("tensor"),
             py::call_guard<py::gil_scoped_release>());
  module.def("unpack_8bit", &compression::unpack_8bit, py::arg("packed"), py::arg("tensor"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace ldt
