// Names of dtypes, texts of shapes.
#include "common/tensor_info.h"

#include <sstream>

#include "common/torch_private.h"

namespace ldt {

bool is_sendable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_nested() && !torch_private::is_wrapper(tensor);
}

std::string dtype_name(at::ScalarType dtype) {
  if (dtype == at::ScalarType::Undefined) return "undefined";  // torch has no name for it
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  const char* separator = "";
  for (const auto& tensor : tensors) {
    text << separator << dtype_name(tensor.scalar_type());
    tensor.is_nested() ? text << "[nested]" : text << tensor.sizes();
    separator = ", ";
  }
  return tensors.empty() ? "no tensors" : text.str();
}

}  // namespace ldt
