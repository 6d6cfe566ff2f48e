// How a message is described, cut into pieces and announced.
#include "common/error.h"
#include "common/wire_tensors.h"
#include "lanes/announcement.h"
#include "testing.h"

using ldt::Announcement;
using ldt::LaneError;
using ldt::WireTensors;

namespace {

const std::string kLabel = "label";
const ldt::Title kTitle(kLabel, [] { return std::string("title"); });

}  // namespace

TEST(descriptions_name_dtype_and_shape) {
  EXPECT_EQ(ldt::describe({at::ones({4, 8}), at::ones({}, at::kBFloat16)}),
            "float32[4, 8], bfloat16[]");
  EXPECT_EQ(ldt::describe({}), "no tensors");
}

TEST(pieces_cover_the_bytes_in_order) {
  const auto wire = WireTensors::for_send(
      {at::arange(10, at::kInt), at::empty({0}), at::ones({3}, at::kByte)}, at::kCPU, kTitle);
  const auto pieces = wire.pieces(16);
  EXPECT_EQ(pieces.size(), 4u);
  EXPECT_EQ(pieces[0].numel(), 16);
  EXPECT_EQ(pieces[2].numel(), 8);
  EXPECT_EQ(pieces[3].numel(), 3);
  EXPECT_EQ(wire.bytes(), 43);
  EXPECT(at::equal(pieces[1].view(at::kInt), at::arange(4, 8, at::kInt)));
}

TEST(tensors_that_cannot_travel_are_refused) {
  EXPECT_THROW(WireTensors::for_send({at::ones({2}).to_sparse()}, at::kCPU, kTitle), LaneError,
               "title: tensor 0, float32, cannot travel");
  EXPECT_THROW(WireTensors::for_receive({at::ones({1}).expand({4})}, at::kCPU, kTitle), LaneError,
               "overlaps itself");
  EXPECT_THROW(WireTensors::for_send({at::empty({2}, at::TensorOptions().device(at::kMeta))},
                                     at::kCPU, kTitle),
               LaneError, "expected a tensor on cpu");
}

TEST(quantized_tensors_are_refused_by_dtype) {
  EXPECT_THROW(WireTensors::for_send({at::quantize_per_tensor(at::ones({2}), 1.0, 0, at::kQUInt8)},
                                     at::kCPU, kTitle),
               LaneError, "title: tensor 0, quint8, cannot travel");
}

TEST(values_travel_and_not_the_bits_of_a_view) {
  const auto source = at::complex(at::ones({3}), at::arange(1, 4, at::kFloat));
  const std::vector<at::Tensor> views{source.conj(), source._neg_view(), source.conj().t()};
  const auto pieces = WireTensors::for_send(views, at::kCPU, kTitle).pieces(1 << 10);
  EXPECT(at::equal(pieces[0].view(at::kComplexFloat), at::conj_physical(source)));
  EXPECT(at::equal(pieces[1].view(at::kComplexFloat), at::negative(source)));
  EXPECT(at::equal(pieces[2].view(at::kComplexFloat), at::conj_physical(source)));
}

TEST(a_view_receives_values_and_not_bits) {
  const auto source = at::complex(at::ones({3}), at::arange(1, 4, at::kFloat));
  const auto plain = at::zeros_like(source);
  for (const auto& view : {plain.conj(), plain._neg_view()}) {
    auto wire = WireTensors::for_receive({view}, at::kCPU, kTitle);
    wire.pieces(1 << 10)[0].copy_(source.view(at::kByte));
    wire.unstage();
    EXPECT(at::equal(view.resolve_conj().resolve_neg(), source));
  }
}

TEST(sizes_beyond_32_bits_are_counted_right) {
  const int64_t count = (int64_t{5} << 30) + 3;  // a meta tensor has a size and no memory
  const auto large = at::empty({count}, at::TensorOptions().dtype(at::kShort).device(at::kMeta));
  const auto wire = WireTensors::for_send({large, large}, at::kMeta, kTitle);
  EXPECT_EQ(wire.bytes(), 4 * count);
  const auto pieces = wire.pieces(int64_t{3} << 30);
  EXPECT_EQ(pieces.size(), 8u);
  EXPECT_EQ(pieces[0].numel(), int64_t{3} << 30);
  EXPECT_EQ(pieces[3].storage_offset(), int64_t{9} << 30);
  EXPECT_EQ(pieces[3].numel(), (int64_t{1} << 30) + 6);
  EXPECT_EQ(pieces[7].numel(), pieces[3].numel());
  const auto own = Announcement::of({large, large}, wire.bytes(), int64_t{3} << 30);
  const auto heard = Announcement::decode(own.encode());
  EXPECT_EQ(heard.bytes, 4 * count);
  EXPECT_EQ(heard.chunk_bytes, int64_t{3} << 30);
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
