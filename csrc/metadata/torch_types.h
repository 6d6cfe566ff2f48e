// Torch's data types in the wire format.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace ldt::metadata {

/// The index of a torch type in kDTypes, and back. Throws MetadataError for an unknown type.
uint8_t wire_dtype(at::ScalarType dtype);
at::ScalarType torch_dtype(uint8_t dtype);

}  // namespace ldt::metadata
