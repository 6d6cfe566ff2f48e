// The unit that crosses a connection of a socket link: a header, then up to kFrameBytes of payload.
#pragma once

#include <bit>
#include <cstdint>

namespace ldt {

/// Little endian, as both ends are. `message` counts the messages of a lane from 0.
struct FrameHeader {
  enum Kind : uint32_t { kPayload = 0, kPosted = 1 };
  static constexpr uint32_t kMagic = 0x3174646c;  // "ldt1"

  uint32_t magic = kMagic;
  uint32_t kind = kPayload;
  uint32_t lane = 0;
  uint32_t reserved = 0;
  uint64_t message = 0;  // kPosted: how many receives the lane has had posted
  uint64_t total = 0;    // bytes of the message
  uint64_t offset = 0;   // of this frame's payload in it
  uint64_t length = 0;   // of this frame's payload

  bool is_valid() const { return magic == kMagic && kind <= kPosted; }
};
static_assert(sizeof(FrameHeader) == 48 && std::endian::native == std::endian::little);

inline constexpr uint64_t kFrameBytes = uint64_t{128} << 10;

}  // namespace ldt
