// Translates C++ exceptions to Python, and Ctrl-C to C++.
#include "bindings/bindings.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "metadata/format/error.h"

namespace ldt {

void bind_errors(pybind11::module_& module) {
  const auto base = pybind11::module_::import("torch.distributed").attr("DistBackendError");
  static pybind11::object lane_error =
      pybind11::reinterpret_steal<pybind11::object>(PyErr_NewExceptionWithDoc(
          "ldt._C.LaneError",
          "A lane or one of its works failed; the text says which, and what both ends have.",
          base.ptr(), nullptr));
  module.attr("LaneError") = lane_error;
  static pybind11::object metadata_error =
      pybind11::module_::import("ldt.errors").attr("MetadataError");
  pybind11::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const LaneError& e) {
      PyErr_SetString(lane_error.ptr(), e.what_without_backtrace());
    } catch (const metadata::MetadataError& e) {
      PyErr_SetString(metadata_error.ptr(), e.what());
    }
  });
}

void bind_interrupt() {
  // Python runs signal handlers in the main thread only, and only when that thread asks.
  set_interrupt_check([] {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  });
}

}  // namespace ldt
