// Writes a whole message.
#pragma once

#include <cstdint>
#include <vector>

#include "metadata/codec/row_encoder.h"
#include "metadata/format/message.h"

namespace ldt::metadata {

/// Gives the encoder what it asks about rows. Tensors are counted through all microbatches of the
/// content; rows come in order, those of a microbatch's mask before those of its other tensors.
class RowFactsSource : public RowValues {
 public:
  virtual MaskFacts mask(size_t tensor, int64_t row) = 0;
  virtual RuleFacts rule(size_t tensor, int64_t row) = 0;
  // values(): those of the row of the last call of mask or rule.
};

/// The message's bytes. Throws MetadataError for content that no message may have, and for more
/// than `max_elements` elements.
std::vector<uint8_t> encode(const Content& content, RowFactsSource& rows, int64_t max_elements);

/// The number of the mask's row that row `row` of another tensor may follow: rows in turn, as
/// position_ids of shape [3, batch, length] have one for each of three axes.
inline int64_t mask_row_of(int64_t row, int64_t mask_rows) { return row % mask_rows; }

}  // namespace ldt::metadata
