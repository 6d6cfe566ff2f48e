// Packing and unpacking of memory on the host, block by block, in one thread.
#pragma once

#include <cstdint>

#include "compression/format.h"

namespace ldt::compression {

/// Packs `elements` of `data` into packed_bytes(elements) bytes.
void pack_host(const void* data, Element element, int64_t elements, uint8_t* packed);
/// Unpacks them into `data`.
void unpack_host(const uint8_t* packed, Element element, int64_t elements, void* data);

}  // namespace ldt::compression
