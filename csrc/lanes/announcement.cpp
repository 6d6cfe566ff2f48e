// Encodes and decodes announcements.
#include "lanes/announcement.h"

#include <cstring>

#include "common/error.h"
#include "common/tensor_info.h"

namespace ldt {
namespace {

constexpr uint32_t kMagic = 0x6c647431;  // "ldt1": the format and its version

struct Layout {
  uint32_t magic;
  uint32_t matches_leader;
  uint64_t fingerprint;
  int64_t bytes;
  int64_t chunk_bytes;
  char text[Announcement::kBytes - 32];
};
static_assert(sizeof(Layout) == Announcement::kBytes);

// FNV-1a, 64 bit (http://www.isthe.com/chongo/tech/comp/fnv): the same on every machine.
uint64_t fingerprint_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text) {
    hash = (hash ^ c) * 0x100000001b3;
  }
  return hash;
}

}  // namespace

Announcement Announcement::of(const std::vector<at::Tensor>& tensors, int64_t bytes,
                              int64_t chunk_bytes) {
  Announcement announcement;
  announcement.text = describe(tensors);
  announcement.fingerprint = fingerprint_of(announcement.text);
  announcement.bytes = bytes;
  announcement.chunk_bytes = chunk_bytes;
  return announcement;
}

at::Tensor Announcement::encode() const {
  Layout layout{};
  layout.magic = kMagic;
  layout.matches_leader = matches_leader;
  layout.fingerprint = fingerprint;
  layout.bytes = bytes;
  layout.chunk_bytes = chunk_bytes;
  std::strncpy(layout.text, text.c_str(), sizeof(layout.text) - 1);
  auto encoded = at::empty({kBytes}, at::kByte);
  std::memcpy(encoded.mutable_data_ptr(), &layout, sizeof(layout));
  return encoded;
}

Announcement Announcement::decode(const at::Tensor& bytes) {
  Layout layout;
  TORCH_INTERNAL_ASSERT(bytes.nbytes() == sizeof(layout) && bytes.device().is_cpu());
  std::memcpy(&layout, bytes.const_data_ptr(), sizeof(layout));
  if (layout.magic != kMagic || layout.matches_leader > 1 || layout.bytes < 0 ||
      layout.chunk_bytes < 1) {
    throw_lane_error("expected an announcement of this version of ldt, got other bytes; ",
                     "both ends of a lane need the same ldt and the same announce setting");
  }
  layout.text[sizeof(layout.text) - 1] = '\0';
  Announcement announcement;
  announcement.matches_leader = layout.matches_leader != 0;
  announcement.fingerprint = layout.fingerprint;
  announcement.bytes = layout.bytes;
  announcement.chunk_bytes = layout.chunk_bytes;
  announcement.text = layout.text;
  return announcement;
}

std::string Announcement::to_string() const { return c10::str(text, " (", bytes, " bytes)"); }

}  // namespace ldt
