// The receive pool on the CPU: reuse, new tensors, and a limit on the memory it keeps.
#include "common/error.h"
#include "memory/receive_pool.h"
#include "testing.h"

using ldt::ReceivePool;
using Claim = ReceivePool::Claim;

namespace {
std::shared_ptr<ReceivePool> new_pool() {
  return std::make_shared<ReceivePool>(at::kCPU, std::nullopt);
}
}  // namespace

TEST(a_block_is_reused_as_a_fresh_tensor) {
  auto pool = new_pool();
  auto tensor = pool->empty({16}, at::kFloat);
  const void* address = tensor.data_ptr();
  c10::weak_intrusive_ptr<c10::TensorImpl> old(tensor.getIntrusivePtr());
  tensor.reset();
  const auto again = pool->empty({8, 2}, at::kFloat);
  EXPECT(again.data_ptr() == address);
  EXPECT(old.expired());
  EXPECT_EQ(pool->bytes(), 64);
}

TEST(a_view_keeps_the_block) {
  auto pool = new_pool();
  auto tensor = pool->empty({16}, at::kFloat);
  const auto view = tensor.narrow(0, 4, 4);
  const void* address = tensor.data_ptr();
  tensor.reset();
  EXPECT(pool->empty({16}, at::kFloat).data_ptr() != address);
}

TEST(there_are_never_more_blocks_than_were_in_use_at_once) {
  auto pool = new_pool();
  for (int64_t size = 1; size < 500; size += 7) {
    const auto first = pool->empty({size}, at::kByte);
    const auto second = pool->empty({1000 + size}, at::kByte);
  }
  EXPECT(pool->bytes() <= 2 * 1500);
}

TEST(the_pool_follows_the_sizes_that_come) {
  auto pool = new_pool();
  {
    const auto first = pool->empty({1 << 20}, at::kByte),
               second = pool->empty({1 << 20}, at::kByte);
  }
  EXPECT_EQ(pool->bytes(), 2 << 20);
  const void* address = nullptr;
  for (int message = 0; message < 4; ++message) {
    const auto small = pool->empty({4096}, at::kByte);
    if (message > 1) EXPECT(small.data_ptr() == address);
    address = small.data_ptr();
  }
  EXPECT(pool->bytes() <= (1 << 20) + 4096);
}

TEST(only_the_first_receive_into_a_block_takes_the_short_wait) {
  auto pool = new_pool();
  auto tensor = pool->empty({16}, at::kFloat);
  EXPECT(pool->claim({tensor})[0] == Claim::kFree);
  EXPECT(pool->claim({tensor})[0] == Claim::kForeign);
  EXPECT(pool->claim({at::empty({16})})[0] == Claim::kForeign);
  tensor.reset();
  EXPECT(pool->claim({pool->empty({16}, at::kFloat)})[0] == Claim::kFree);
}

TEST(small_tensors_of_a_message_lie_as_they_travel) {
  auto pool = new_pool();
  auto tensors =
      pool->buffers({{3}, {1 << 20}, {0}, {5, 2}}, {at::kByte, at::kFloat, at::kInt, at::kLong});
  const auto address = [](const at::Tensor& tensor) {
    return static_cast<const char*>(tensor.const_data_ptr());
  };
  EXPECT_EQ(address(tensors[3]) - address(tensors[0]), ldt::Packing::kAlignment);
  EXPECT(!tensors[0].is_alias_of(tensors[3]));
  const auto packing = ldt::Packing::of({3, 4 << 20, 0, 80}, at::kCPU);
  const auto find = pool->block_finder();
  EXPECT_EQ(find({tensors[0], tensors[3]}, packing).numel(), packing.bytes);
  EXPECT(!find({tensors[3], tensors[0]}, packing).defined());
  EXPECT(!find({pool->empty({3}, at::kByte), tensors[3]}, packing).defined());
  EXPECT(pool->claim(tensors) == std::vector<Claim>(4, Claim::kFree));
  EXPECT(pool->claim({tensors[3]})[0] == Claim::kForeign);
  const void* block = tensors[0].const_data_ptr();
  tensors[0].reset();
  const auto other = pool->empty({packing.bytes}, at::kByte);
  EXPECT(other.const_data_ptr() != block);
  tensors.clear();
  EXPECT(pool->empty({packing.bytes}, at::kByte).const_data_ptr() == block);
}

TEST(tensors_outlive_the_pool) {
  auto pool = new_pool();
  auto tensor = pool->empty({4}, at::kLong);
  pool.reset();
  tensor.fill_(3);
  EXPECT_EQ(tensor.sum().item<int64_t>(), 12);
}

TEST(negative_sizes_are_refused) {
  EXPECT_THROW(new_pool()->empty({-2, -4}, at::kFloat), ldt::LaneError, "got [-2, -4]");
}

TEST(quantized_dtypes_are_refused) {
  EXPECT_THROW(new_pool()->empty({2}, at::kQUInt8), ldt::LaneError, "got quint8");
}

TEST(bytes_are_counted_in_63_bits) {
  EXPECT_EQ(ldt::bytes_of({}, at::kDouble), 8);
  EXPECT_EQ(ldt::bytes_of({3, 5}, at::kHalf), 30);
  EXPECT_EQ(ldt::bytes_of({1 << 20, 1 << 20}, at::kFloat), int64_t{1} << 42);
  // 2^64 + 2^32 elements would wrap around to a block that is too small.
  const int64_t large = int64_t{1} << 32;
  EXPECT_THROW(ldt::bytes_of({large, large + 1}, at::kByte), ldt::LaneError,
               "got uint8[4294967296, 4294967297]");
  EXPECT_THROW(ldt::bytes_of({large, large / 2}, at::kByte), ldt::LaneError, "less than 2^63");
  EXPECT_THROW(new_pool()->empty({large, large + 1}, at::kByte), ldt::LaneError, "2^63");
}

TEST(no_elements_take_no_block) {
  auto pool = new_pool();
  EXPECT_EQ(pool->empty({0, 3}, at::kFloat).numel(), 0);
  EXPECT_EQ(pool->bytes(), 0);
}
