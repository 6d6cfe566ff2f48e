// One function per group of bindings, which adds it to the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ldt {

void bind_transports(pybind11::module_& module);
void bind_compression(pybind11::module_& module);
void bind_errors(pybind11::module_& module);
void bind_interrupt();
void bind_lanes(pybind11::module_& module);
void bind_metadata(pybind11::module_& module);
void bind_metadata_pack(pybind11::module_& module);
void bind_tensors(pybind11::module_& module);

}  // namespace ldt
