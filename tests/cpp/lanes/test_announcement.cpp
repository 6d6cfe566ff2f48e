// Announcements of messages: which are equal, and which are refused.
#include "common/error.h"
#include "lanes/announcement.h"
#include "testing.h"

using ldt::Announcement;
using ldt::LaneError;

TEST(sizes_beyond_32_bits_are_announced) {
  const int64_t count = (int64_t{5} << 30) + 3;  // a meta tensor has a size and no memory
  const auto large = at::empty({count}, at::TensorOptions().dtype(at::kShort).device(at::kMeta));
  const auto own = Announcement::of({large, large}, 4 * count, int64_t{3} << 30);
  const auto decoded = Announcement::decode(own.encode());
  EXPECT_EQ(decoded.bytes, 4 * count);
  EXPECT_EQ(decoded.chunk_bytes, int64_t{3} << 30);
}

TEST(announcements_come_back_as_they_were) {
  const auto own = Announcement::of({at::ones({4, 8})}, 128, 1024);
  const auto decoded = Announcement::decode(own.encode());
  EXPECT(own.matches(decoded));
  EXPECT_EQ(decoded.to_string(), "float32[4, 8] (128 bytes)");
}

TEST(what_differs_does_not_match) {
  const auto own = Announcement::of({at::ones({4, 8})}, 128, 1024);
  EXPECT(!own.matches(Announcement::of({at::ones({8, 4})}, 128, 1024)));
  EXPECT(!own.matches(Announcement::of({at::ones({4, 8}, at::kInt)}, 128, 1024)));
  EXPECT(!own.matches(Announcement::of({at::ones({4, 8})}, 128, 2048)));
}

TEST(long_lists_are_distinguished_beyond_the_text) {
  std::vector<at::Tensor> many(200, at::ones({3})), other = many;
  other.back() = at::ones({3}, at::kInt);
  const auto own = Announcement::of(many, 2400, 64), theirs = Announcement::of(other, 2400, 64);
  EXPECT(own.matches(Announcement::decode(own.encode())));
  EXPECT(!own.matches(Announcement::decode(theirs.encode())));
}

TEST(other_bytes_are_no_announcement) {
  EXPECT_THROW(Announcement::decode(at::zeros({Announcement::kBytes}, at::kByte)), LaneError,
               "got other bytes");
}
