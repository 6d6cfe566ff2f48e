// Launchers of the kernels. Includes neither torch nor CUDA, as both sides of the boundary include
// it.
#pragma once

#include <cstdint>

#include "compression/format.h"

// All on device memory of the current device; `stream` is a cudaStream_t. They do not wait, and
// return null or CUDA's error message.

// Packs `elements` of `data` into packed_bytes(elements) bytes, the same as pack_host.
extern "C" const char* ldt_compression_pack(const void* data, ldt::compression::Element element,
                                            int64_t elements, uint8_t* packed, void* stream);
extern "C" const char* ldt_compression_unpack(const uint8_t* packed,
                                              ldt::compression::Element element, int64_t elements,
                                              void* data, void* stream);
