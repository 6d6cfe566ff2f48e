// How a message is described, cut into pieces and announced.
#include "common/error.h"
#include "common/wire_tensors.h"
#include "lanes/announcement.h"
#include "testing.h"

using ldt::Announcement;
using ldt::LaneError;
using ldt::WireTensors;

TEST(descriptions_name_dtype_and_shape) {
  EXPECT_EQ(ldt::describe({at::ones({4, 8}), at::ones({}, at::kBFloat16)}),
            "float32[4, 8], bfloat16[]");
  EXPECT_EQ(ldt::describe({}), "no tensors");
}

TEST(pieces_cover_the_bytes_in_order) {
  const auto wire = WireTensors::for_send(
      {at::arange(10, at::kInt), at::empty({0}), at::ones({3}, at::kByte)}, at::kCPU, "");
  const auto pieces = wire.pieces(16);
  EXPECT_EQ(pieces.size(), 4u);
  EXPECT_EQ(pieces[0].numel(), 16);
  EXPECT_EQ(pieces[2].numel(), 8);
  EXPECT_EQ(pieces[3].numel(), 3);
  EXPECT_EQ(wire.bytes(), 43);
  EXPECT(at::equal(pieces[1].view(at::kInt), at::arange(4, 8, at::kInt)));
}

TEST(tensors_that_cannot_travel_are_refused) {
  EXPECT_THROW(WireTensors::for_send({at::ones({2}).to_sparse()}, at::kCPU, "title"), LaneError,
               "title: tensor 0 cannot travel");
  EXPECT_THROW(WireTensors::for_receive({at::ones({1}).expand({4})}, at::kCPU, "title"), LaneError,
               "overlaps itself");
  EXPECT_THROW(WireTensors::for_send({at::empty({2}, at::TensorOptions().device(at::kMeta))},
                                     at::kCPU, "title"),
               LaneError, "expected a tensor on cpu");
}

TEST(announcements_come_back_as_they_were) {
  const auto own = Announcement::of({at::ones({4, 8})}, 128, 1024);
  const auto heard = Announcement::decode(own.encode());
  EXPECT(own.matches(heard));
  EXPECT_EQ(heard.to_string(), "float32[4, 8] (128 bytes)");
}

TEST(what_differs_does_not_match) {
  const auto own = Announcement::of({at::ones({4, 8})}, 128, 1024);
  EXPECT(!own.matches(Announcement::of({at::ones({8, 4})}, 128, 1024)));
  EXPECT(!own.matches(Announcement::of({at::ones({4, 8}, at::kInt)}, 128, 1024)));
  EXPECT(!own.matches(Announcement::of({at::ones({4, 8})}, 128, 2048)));
}

TEST(long_lists_are_told_apart_beyond_the_text) {
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
