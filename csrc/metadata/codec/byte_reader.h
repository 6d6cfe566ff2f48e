// Reads the wire format's primitives from untrusted bytes, never past their end.
#pragma once

#include <cstdint>
#include <string>

namespace ldt::metadata {

/// A cursor over bytes that it does not own. Every member throws MetadataError, with the offset, if
/// the bytes are not what it reads.
class ByteReader {
 public:
  ByteReader(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t byte(const char* what);
  /// Accepts the shortest form only, so that a value has one encoding.
  uint64_t varint(const char* what);
  int64_t signed_varint(const char* what);
  /// A varint of at most `limit`.
  uint64_t varint_up_to(uint64_t limit, const char* what);
  /// A count of items that take at least one byte each, so at most remaining().
  size_t count(const char* what);
  /// Valid UTF-8.
  std::string text(const char* what);
  /// The next `count` bytes.
  const uint8_t* take(uint64_t count, const char* what);

  size_t offset() const { return offset_; }
  size_t remaining() const { return size_ - offset_; }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t offset_ = 0;
};

}  // namespace ldt::metadata
