// Into how many pieces a message is split when a stage passes it on.
#include "testing.h"
#include "transports/piece_size.h"

using ldt::piece_bytes;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kMost = 16 * kMiB;

int64_t pieces_of(int64_t message, int hops, int64_t most = kMost) {
  const auto piece = piece_bytes(message, hops, most);
  return (message + piece - 1) / piece;
}

}  // namespace

TEST(what_is_not_passed_on_is_whole) {
  EXPECT_EQ(pieces_of(16 * kMiB, 0), 1);
  EXPECT_EQ(pieces_of(1, 0), 1);
}

TEST(small_messages_are_whole_and_large_ones_are_not) {
  for (const int64_t bytes : {int64_t{1}, int64_t{1000}, kMiB, 2 * kMiB}) {
    EXPECT_EQ(pieces_of(bytes, 1), 1);
  }
  EXPECT_EQ(pieces_of(16 * kMiB, 1), 3);
  EXPECT_EQ(pieces_of(64 * kMiB, 1), 6);
}

TEST(a_longer_chain_has_more_of_them) {
  EXPECT_EQ(pieces_of(16 * kMiB, 2), 4);
  EXPECT_EQ(pieces_of(64 * kMiB, 2), 8);
  EXPECT_EQ(pieces_of(256 * kMiB, 2), 16);
}

TEST(no_piece_is_larger_than_the_lane_allows) {
  EXPECT_EQ(piece_bytes(256 * kMiB, 1, kMost), kMost);
  EXPECT_EQ(piece_bytes(5 * kMiB, 1, 1000), 1000);
  EXPECT_EQ(piece_bytes(7, 1, 1), 1);
}

TEST(pieces_are_aligned_and_never_empty) {
  for (int64_t bytes = 0; bytes < 4096 * kMiB; bytes = 3 * bytes + 1) {
    for (int hops = 0; hops < 8; ++hops) {
      const auto piece = piece_bytes(bytes, hops, kMost);
      EXPECT(piece >= 1);
      EXPECT_EQ(piece % (64 << 10), 0);
    }
  }
}
