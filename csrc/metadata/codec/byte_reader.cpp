// Checks every primitive for bounds, shortest form and UTF-8.
#include "metadata/codec/byte_reader.h"

#include "metadata/format/error.h"

namespace ldt::metadata {
namespace {

// The length of the UTF-8 sequence that `lead` begins; 0 if it begins none.
size_t sequence_bytes(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  if (lead >= 0xF0 && lead < 0xF5) return 4;
  return 0;
}

// The second byte tells overlong forms, surrogates and values beyond U+10FFFF.
bool second_byte_fits(uint8_t lead, uint8_t second) {
  switch (lead) {
    case 0xE0: return second >= 0xA0 && second < 0xC0;
    case 0xED: return second >= 0x80 && second < 0xA0;
    case 0xF0: return second >= 0x90 && second < 0xC0;
    case 0xF4: return second >= 0x80 && second < 0x90;
    default: return second >= 0x80 && second < 0xC0;
  }
}

bool is_utf8(const uint8_t* data, size_t size) {
  for (size_t at = 0; at < size;) {
    const size_t length = sequence_bytes(data[at]);
    if (length == 0 || length > size - at) return false;
    if (length > 1 && !second_byte_fits(data[at], data[at + 1])) return false;
    for (size_t next = 2; next < length; ++next) {
      if ((data[at + next] & 0xC0) != 0x80) return false;
    }
    at += length;
  }
  return true;
}

}  // namespace

uint8_t ByteReader::byte(const char* what) { return *take(1, what); }

uint64_t ByteReader::varint(const char* what) {
  const size_t start = offset_;
  uint64_t value = 0;
  for (unsigned shift = 0; shift < 70; shift += 7) {
    const uint8_t next = byte(what);
    if (shift == 63 && next > 1) break;
    value |= static_cast<uint64_t>(next & 0x7F) << shift;
    if (next >= 0x80) continue;
    if (next == 0 && shift != 0) break;
    return value;
  }
  fail("metadata message: ", what, " at byte ", start,
       " is no number of 64 bits in its shortest form; the message is damaged");
}

int64_t ByteReader::signed_varint(const char* what) {
  const uint64_t value = varint(what);
  return static_cast<int64_t>((value >> 1) ^ (~(value & 1) + 1));
}

uint64_t ByteReader::varint_up_to(uint64_t limit, const char* what) {
  const size_t start = offset_;
  const uint64_t value = varint(what);
  if (value > limit) {
    fail("metadata message: expected ", what, " of at most ", limit, " at byte ", start, ", got ",
         value, "; the message is damaged");
  }
  return value;
}

size_t ByteReader::count(const char* what) {
  const size_t start = offset_;
  const uint64_t value = varint(what);
  if (value > remaining()) {
    fail("metadata message: ", what, " at byte ", start, " is ", value, ", but only ", remaining(),
         " bytes follow; the message is damaged");
  }
  return static_cast<size_t>(value);
}

std::string ByteReader::text(const char* what) {
  const size_t length = count(what);
  const size_t start = offset_;
  const uint8_t* bytes = take(length, what);
  if (!is_utf8(bytes, length)) {
    fail("metadata message: ", what, " at byte ", start, " is not UTF-8; the message is damaged");
  }
  return {reinterpret_cast<const char*>(bytes), length};
}

const uint8_t* ByteReader::take(uint64_t count, const char* what) {
  if (count > remaining()) {
    fail("metadata message: ", what, " at byte ", offset_, " needs ", count, " bytes, but only ",
         remaining(), " follow; the message is cut short or damaged");
  }
  const uint8_t* taken = data_ + offset_;
  offset_ += static_cast<size_t>(count);
  return taken;
}

}  // namespace ldt::metadata
