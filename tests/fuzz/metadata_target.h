// What is fuzzed: the decoder of metadata messages, and all that follows from what it accepts.
#pragma once

#include <cstddef>
#include <cstdint>

/// Decodes the bytes; what is accepted is rebuilt, written again and read again, and must come out
/// the same. Aborts if it does not.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
