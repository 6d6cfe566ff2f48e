// Who else uses a tensor's memory.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "memory/tensor_ownership.h"

namespace ldt {

void bind_tensors(pybind11::module_& module) {
  module.def("is_memory_own", &is_memory_own, pybind11::arg("tensors"));
  pybind11::class_<VersionCounters>(module, "VersionCounters")
      .def(pybind11::init<const MaybeTensors&>(), pybind11::arg("tensors"))
      .def("first_changed", &VersionCounters::first_changed);
}

}  // namespace ldt
