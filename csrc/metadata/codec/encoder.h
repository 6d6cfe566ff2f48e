// Encodes a whole message.
#pragma once

#include <cstdint>
#include <vector>

#include "metadata/format/message.h"
#include "metadata/format/row_source.h"

namespace ldt::metadata {

/// The message's bytes. Throws MetadataError for invalid content and for more than `max_elements`
/// elements.
std::vector<uint8_t> encode(const Content& content, RowFactsSource& rows, int64_t max_elements);

}  // namespace ldt::metadata
