// The kernels give the bytes and elements of the host. They run on host threads.
#include <cstring>
#include <random>

#include "compression/cuda/codec.cu"
#include "compression/host_codec.h"
#include "testing.h"

using namespace ldt::compression;

namespace {

// Random elements: a third of any bits, a third of one magnitude, a third near the largest.
std::vector<uint8_t> random_elements(Element element, int64_t size, std::mt19937& random) {
  const bool wide = element == Element::kFloat32;
  const int shift = wide ? 23 : element == Element::kBFloat16 ? 7 : 10;
  const uint32_t ones = wide || element == Element::kBFloat16 ? 0xff : 0x1f;
  const int width = wide ? 4 : 2;
  const auto kind = random() % 3;
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t bits = static_cast<uint32_t>(random()) >> (wide ? 0 : 16);
    if (kind > 0 && random() % 50 > 0) {
      const uint32_t exponent = kind == 1 ? random() % 12 : ones - 1 - random() % 12;
      bits = (bits & ~(ones << shift)) | (exponent << shift);
    }
    for (int byte = 0; byte < width; ++byte) {
      bytes.push_back(static_cast<uint8_t>(bits >> (8 * byte)));
    }
  }
  return bytes;
}

template <Element kElement>
void compare(int64_t size, std::mt19937& random) {
  const std::vector<uint8_t> data = random_elements(kElement, size, random);
  const auto bytes = static_cast<size_t>(packed_bytes(size));
  std::vector<uint8_t> packed(bytes), expected(bytes), unpacked(data.size()), whole(data.size());
  pack_host(data.data(), kElement, size, expected.data());
  unpack_host(expected.data(), kElement, size, whole.data());
  gridDim.x = 2;  // fewer warps than blocks: they stride
  fake_cuda::launch(2, 64, [&] { pack<kElement>(data.data(), size, packed.data()); });
  EXPECT(packed == expected);
  fake_cuda::launch(2, 64, [&] { unpack<kElement>(packed.data(), size, unpacked.data()); });
  EXPECT(unpacked == whole);
}

}  // namespace

TEST(kernels_give_the_bytes_of_the_host) {
  std::mt19937 random(7);
  for (const int64_t size : {1, 31, 127, 128, 129, 500, 1000, 2000}) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      compare<Element::kFloat32>(size, random);
      compare<Element::kBFloat16>(size, random);
      compare<Element::kFloat16>(size, random);
    }
  }
}
