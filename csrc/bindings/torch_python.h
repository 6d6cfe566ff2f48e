// The names of torch's Python binding that ldt uses and torch does not document. Read in
// torch 2.13.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace ldt::torch_private {

// pybind11's own caster of at::Tensor copies the reference, which takes the GIL once more for a
// tensor that has a Python object; a step has hundreds of them.

/// THPVariable_Check: whether the object is a torch.Tensor or of a subclass.
inline bool is_tensor(pybind11::handle object) { return THPVariable_Check(object.ptr()); }

/// THPVariable_Unpack: the tensor of a Python object, which keeps it alive.
inline const at::Tensor& tensor_of(pybind11::handle object) {
  return THPVariable_Unpack(object.ptr());
}

/// THPVariable_Wrap: the Python object of a tensor; null where that raised.
inline pybind11::object to_python(at::Tensor&& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(tensor)));
}

}  // namespace ldt::torch_private
