// Appends the wire format's primitives: bytes, varints, texts.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ldt::metadata {

/// Maps small magnitudes of either sign to small numbers: 0, -1, 1, -2 become 0, 1, 2, 3.
constexpr uint64_t zigzag(int64_t value) {
  return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
}

/// Bytes that `ByteWriter::varint` writes for `value`: 1 to 10.
constexpr uint64_t varint_bytes(uint64_t value) {
  uint64_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

/// Seven bits per byte, lowest first; all bytes but the last have the top bit set.
class ByteWriter {
 public:
  void byte(uint8_t value) { bytes_.push_back(value); }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<uint8_t>(value | 0x80));
    bytes_.push_back(static_cast<uint8_t>(value));
  }
  void signed_varint(int64_t value) { varint(zigzag(value)); }
  void text(std::string_view text) {
    varint(text.size());
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  void append(const std::vector<uint8_t>& bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  /// `count` zero bytes, to be filled by the caller before the next call.
  uint8_t* extend(size_t count) {
    bytes_.resize(bytes_.size() + count);
    return bytes_.data() + bytes_.size() - count;
  }
  void clear() { bytes_.clear(); }
  size_t size() const { return bytes_.size(); }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace ldt::metadata
