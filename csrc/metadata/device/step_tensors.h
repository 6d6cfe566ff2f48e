// The tensors of a step, wherever they lie.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace ldt::metadata {

/// Contiguous: the caller's, or copies of them.
using Tensors = std::vector<c10::MaybeOwned<at::Tensor>>;

}  // namespace ldt::metadata
