// Writes one row with the shortest code that is right for it.
#pragma once

#include <cstdint>

#include "metadata/codec/byte_writer.h"
#include "metadata/codec/stretches.h"
#include "metadata/format/row_source.h"

namespace ldt::metadata {

/// Picks the shortest code, and of equally short ones the lowest number. The result depends on the
/// elements only: facts from a device and from the host give the same bytes.
class RowEncoder {
 public:
  explicit RowEncoder(ByteWriter& out) : out_(out) {}

  /// A row of attention_mask.
  void mask(const MaskFacts& facts, int64_t length, RowValues& source);
  /// A row of any other tensor.
  void rule(const RuleFacts& facts, int64_t length, RowValues& source);

 private:
  void simple_mask(const MaskFacts& facts, int64_t length, RowValues& source);
  void keep_if_shorter();
  template <typename Stretches>
  void try_packed(const MaskFacts& facts, Stretches stretches);
  void try_bits(const int64_t* values, int64_t length);
  void try_bits(const RowBits& bits, int64_t length);
  template <typename Stretches>
  void try_runs_of_stretches(Stretches stretches, int64_t length);
  void try_runs(const int64_t* values, int64_t length);
  bool raw_may_be_shorter(int64_t length) const;
  void try_raw(const int64_t* values, int64_t length);
  bool too_long() const { return best_.size() != 0 && trial_.size() >= best_.size(); }

  ByteWriter& out_;
  ByteWriter trial_;
  ByteWriter lengths_;
  ByteWriter best_;  // empty: none yet
};

}  // namespace ldt::metadata
