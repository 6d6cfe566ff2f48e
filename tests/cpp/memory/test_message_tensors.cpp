// How a message is described, packed and cut into pieces.
#include "common/error.h"
#include "common/tensor_info.h"
#include "memory/message_tensors.h"
#include "testing.h"

using ldt::LaneError;
using ldt::MessageTensors;

namespace {

const std::string kLabel = "label";
const ldt::MessageName kName(kLabel, [] { return std::string("title"); });

}  // namespace

TEST(descriptions_name_dtype_and_shape) {
  EXPECT_EQ(ldt::describe({at::ones({4, 8}), at::ones({}, at::kBFloat16)}),
            "float32[4, 8], bfloat16[]");
  EXPECT_EQ(ldt::describe({}), "no tensors");
}

TEST(pieces_cover_the_bytes_in_order) {
  const auto large = at::arange(20000, at::kInt);
  const auto message =
      MessageTensors::for_send({large, at::empty({0}), at::ones({3}, at::kByte)}, at::kCPU, kName);
  const auto pieces = message.pieces(40000);
  EXPECT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].numel(), 40000);
  EXPECT_EQ(pieces[1].numel(), 40000);
  EXPECT_EQ(pieces[2].numel(), 3);
  EXPECT_EQ(message.bytes(), 80003);
  EXPECT(at::equal(pieces[1].view(at::kInt), large.narrow(0, 10000, 10000)));
  EXPECT(pieces[0].is_alias_of(large));
}

TEST(small_tensors_are_packed_with_zeros_between) {
  const std::vector<at::Tensor> message{at::arange(3, at::kInt), at::ones({2}).t(),
                                        at::ones({1 << 20}), at::arange(4, at::kLong)};
  const auto sent = MessageTensors::for_send(message, at::kCPU, kName);
  EXPECT_EQ(sent.transfers().size(), 2u);
  EXPECT_EQ(sent.transfers()[1].first, 2u);
  const auto block = sent.transfers()[0].data;
  EXPECT_EQ(block.numel(), 2 * ldt::Packing::kAlignment + 32);
  EXPECT_EQ(block.narrow(0, 12, ldt::Packing::kAlignment - 12).sum().item<int64_t>(), 0);
  std::vector<at::Tensor> targets;
  for (const auto& tensor : message) targets.push_back(at::zeros_like(tensor));
  targets[0] = at::zeros({3, 2}, at::kInt).t()[0];  // not contiguous
  auto received = MessageTensors::for_receive(targets, at::kCPU, kName);
  received.transfers()[0].data.copy_(block);
  received.unstage();
  for (const size_t i : {0, 1, 3}) EXPECT(at::equal(targets[i], message[i]));
}

TEST(the_number_of_transfers_is_bounded_on_devices) {
  std::vector<int64_t> sizes(300, 1 << 20);
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] += static_cast<int64_t>(i);
  sizes[7] = 12;
  const auto packing = ldt::Packing::of(sizes, at::kCUDA);
  EXPECT_EQ(packing.members.size(), 300 - ldt::Packing::kMaxTransfers + 1);
  EXPECT_EQ(packing.members.back(), 284u);
  EXPECT(ldt::Packing::of(sizes, at::kCPU).members.empty());  // one alone is not copied
  EXPECT_EQ(ldt::Packing::of(std::vector<int64_t>(300, 1 << 20), at::kCUDA).members.size(), 300u);
}

TEST(tensors_that_cannot_travel_are_refused) {
  EXPECT_THROW(MessageTensors::for_send({at::ones({2}).to_sparse()}, at::kCPU, kName), LaneError,
               "title: tensor 0, float32, cannot travel");
  EXPECT_THROW(MessageTensors::for_receive({at::ones({1}).expand({4})}, at::kCPU, kName), LaneError,
               "overlaps itself");
  EXPECT_THROW(MessageTensors::for_send({at::empty({2}, at::TensorOptions().device(at::kMeta))},
                                        at::kCPU, kName),
               LaneError, "expected a tensor on cpu");
}

TEST(quantized_tensors_are_refused_by_dtype) {
  EXPECT_THROW(MessageTensors::for_send(
                   {at::quantize_per_tensor(at::ones({2}), 1.0, 0, at::kQUInt8)}, at::kCPU, kName),
               LaneError, "title: tensor 0, quint8, cannot travel");
}

TEST(values_travel_and_not_the_bits_of_a_view) {
  const auto source = at::complex(at::ones({3}), at::arange(1, 4, at::kFloat));
  const std::vector<at::Tensor> views{source.conj(), source._neg_view(), source.conj().t()};
  for (const auto& view : views) {
    const auto pieces = MessageTensors::for_send({view}, at::kCPU, kName).pieces(1 << 10);
    EXPECT(at::equal(pieces[0].view(at::kComplexFloat), view.resolve_conj().resolve_neg()));
  }
}

TEST(a_view_receives_values_and_not_bits) {
  const auto source = at::complex(at::ones({3}), at::arange(1, 4, at::kFloat));
  const auto plain = at::zeros_like(source);
  for (const auto& view : {plain.conj(), plain._neg_view()}) {
    auto message = MessageTensors::for_receive({view}, at::kCPU, kName);
    message.pieces(1 << 10)[0].copy_(source.view(at::kByte));
    message.unstage();
    EXPECT(at::equal(view.resolve_conj().resolve_neg(), source));
  }
}

TEST(sizes_beyond_32_bits_are_counted_right) {
  const int64_t count = (int64_t{5} << 30) + 3;  // a meta tensor has a size and no memory
  const auto large = at::empty({count}, at::TensorOptions().dtype(at::kShort).device(at::kMeta));
  const auto message = MessageTensors::for_send({large, large}, at::kMeta, kName);
  EXPECT_EQ(message.bytes(), 4 * count);
  const auto pieces = message.pieces(int64_t{3} << 30);
  EXPECT_EQ(pieces.size(), 8u);
  EXPECT_EQ(pieces[0].numel(), int64_t{3} << 30);
  EXPECT_EQ(pieces[3].storage_offset(), int64_t{9} << 30);
  EXPECT_EQ(pieces[3].numel(), (int64_t{1} << 30) + 6);
  EXPECT_EQ(pieces[7].numel(), pieces[3].numel());
}
