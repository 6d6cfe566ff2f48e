// What the encoder asks about rows: answered from host memory, or from what a kernel found.
#pragma once

#include <cstddef>
#include <cstdint>

#include "metadata/format/rows.h"

namespace ldt::metadata {

/// A row of zeros and ones, or of segments numbered from 1 without holes, as two planes of bits,
/// the lowest of a word first: which elements are not 0, and which (but the first) differ from the
/// one before. `nonzero` is null where a row is not known as bits.
struct RowBits {
  const uint32_t* nonzero = nullptr;
  const uint32_t* changed = nullptr;
};

/// The elements of a row, for the codes that need them: few rows do.
class RowValues {
 public:
  virtual ~RowValues() = default;
  /// `length` elements, valid until the next call.
  virtual const int64_t* values() = 0;
  /// Instead of them the bits of a row of attention_mask that is binary or numbered, if known.
  virtual RowBits bits() { return {}; }
};

/// Facts about rows. Tensors are counted through all microbatches of the content; rows come in
/// order, those of a microbatch's mask before those of its other tensors.
class RowFactsSource : public RowValues {
 public:
  virtual MaskFacts mask(size_t tensor, int64_t row) = 0;
  virtual RuleFacts rule(size_t tensor, int64_t row) = 0;
  // values(): those of the row of the last call of mask or rule.
};

/// The number of the mask's row that row `row` of another tensor may follow: rows in turn, as
/// position_ids of shape [3, batch, length] have one for each of three axes.
inline int64_t mask_row_of(int64_t row, int64_t mask_rows) { return row % mask_rows; }

}  // namespace ldt::metadata
