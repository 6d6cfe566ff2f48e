// What is fuzzed: the decoder of metadata messages, and everything computed from its result.
#pragma once

#include <cstddef>
#include <cstdint>

/// Decodes the bytes; an accepted message is rebuilt, encoded again and decoded again, and must be
/// equal each time. Aborts if it is not.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
