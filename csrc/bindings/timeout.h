// Timeouts from Python: a timedelta or a number of seconds.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "common/timeout.h"

namespace ldt {

/// An unchecked timeout argument. pybind11's own conversion to milliseconds overflows for infinity
/// and for large timedeltas.
struct Timeout {
  double seconds = 0;
};

}  // namespace ldt

template <>
struct pybind11::detail::type_caster<ldt::Timeout> {
  PYBIND11_TYPE_CASTER(ldt::Timeout, const_name("datetime.timedelta | float"));

  bool load(handle source, bool /*convert*/) {
    if (hasattr(source, "total_seconds")) source = seconds_ = source.attr("total_seconds")();
    if (PyBool_Check(source.ptr()) ||
        !(PyFloat_Check(source.ptr()) || PyLong_Check(source.ptr()))) {
      return false;
    }
    value.seconds = PyFloat_AsDouble(source.ptr());
    if (PyErr_Occurred()) {  // an int that no float can hold
      PyErr_Clear();
      value.seconds = std::numeric_limits<double>::infinity();
    }
    return true;
  }
  static handle cast(const ldt::Timeout& timeout, return_value_policy, handle) {
    const auto timedelta = module_::import("datetime").attr("timedelta");
    return timedelta(arg("seconds") = timeout.seconds).release();
  }

 private:
  object seconds_;
};
