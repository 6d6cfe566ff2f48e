// Rebuilds rows on the host.
#pragma once

#include <cstdint>

#include "metadata/format/rows.h"

namespace ldt::metadata {

/// Writes the row's elements to `buffer + row.output`. Equal to value_at for each element.
void rebuild_row(const RowPlan& row, const RowLists& lists, uint8_t* buffer);

/// The row's elements as 64-bit integers.
void rebuild_values(const RowPlan& row, const RowLists& lists, int64_t* values);

}  // namespace ldt::metadata
