// The attribute names of Python's metadata objects, interned, so that look-ups compare addresses.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>
#include <vector>

#include "metadata/format/format.h"

namespace ldt {

/// Of the fields of MicrobatchMetadata, and of tensors, as metadata::kNames.
struct MetadataNames {
  pybind11::str id = interned("id");
  pybind11::str hops = interned("hops");
  pybind11::str tensors = interned("tensors");
  std::vector<pybind11::str> of_tensors;

  static const MetadataNames& get() {
    // Never deleted: Python objects must not be released after the interpreter's end.
    static const auto* const made = new MetadataNames;
    return *made;
  }

 private:
  MetadataNames() {
    for (const auto& name : metadata::kNames) of_tensors.push_back(interned(name.text));
  }

  static pybind11::str interned(std::string_view text) {
    PyObject* made = PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    if (made == nullptr) throw pybind11::error_already_set();
    PyUnicode_InternInPlace(&made);
    return pybind11::reinterpret_steal<pybind11::str>(made);
  }
};

}  // namespace ldt
