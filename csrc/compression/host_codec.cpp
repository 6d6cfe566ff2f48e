// Loops over one block each, which compilers vectorize; compiled twice for x86-64, as SSE2 lacks
// much.
#include "compression/host_codec.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#define LDT_AVX2 __attribute__((target("avx2")))
#endif

namespace ldt::compression {
namespace {

template <Element kElement>
struct Storage {
  using Type = uint16_t;
};
template <>
struct Storage<Element::kFloat32> {
  using Type = uint32_t;
};

template <Element kElement>
LDT_CODEC uint32_t widen(typename Storage<kElement>::Type element) {
  if constexpr (kElement == Element::kFloat32) return element;
  if constexpr (kElement == Element::kBFloat16) return static_cast<uint32_t>(element) << 16;
  if constexpr (kElement == Element::kFloat16) return widen_half(element);
}

template <Element kElement>
LDT_CODEC typename Storage<kElement>::Type narrow(uint32_t bits) {
  using Type = typename Storage<kElement>::Type;
  if constexpr (kElement == Element::kFloat32) return bits;
  if constexpr (kElement == Element::kBFloat16) return static_cast<Type>(bits >> 16);
  if constexpr (kElement == Element::kFloat16) return static_cast<Type>(narrow_half(bits));
}

/// Packs one block and returns its exponent.
template <Element kElement>
LDT_CODEC int pack_block(const typename Storage<kElement>::Type* data, uint8_t* codes) {
  uint32_t widened[kBlock];
  const uint32_t* bits = widened;
  if constexpr (kElement == Element::kFloat32) {
    bits = data;
  } else {
    for (int64_t i = 0; i < kBlock; ++i) widened[i] = widen<kElement>(data[i]);
  }
  int32_t largest = 0;  // magnitudes are below 2^31, and vector units of x86 compare signed numbers
  for (int64_t i = 0; i < kBlock; ++i) {
    largest = std::max(largest, static_cast<int32_t>(bits[i] & 0x7fffffff));
  }
  const bool is_finite = largest < static_cast<int32_t>(kInfinity);
  if (!is_finite) {
    largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      largest = std::max(largest, static_cast<int32_t>(finite_magnitude(bits[i])));
    }
  }
  const int exponent = exponent_of(static_cast<uint32_t>(largest));
  const Scale scale(-exponent);
  const uint32_t top = largest_code(exponent, kElement);
  if (is_finite && top == kLargestCode) {  // nearly all blocks: what encode does, in less
    for (int64_t i = 0; i < kBlock; ++i) {
      codes[i] = static_cast<uint8_t>(encode_magnitude(bits[i] & 0x7fffffff, scale) |
                                      ((bits[i] >> 24) & 0x80));
    }
    for (int64_t i = 0; i < kBlock; ++i) codes[i] = codes[i] == kNaN ? uint8_t{0} : codes[i];
  } else {
    for (int64_t i = 0; i < kBlock; ++i)
      codes[i] = static_cast<uint8_t>(encode(bits[i], scale, top));
  }
  return exponent;
}

template <Element kElement>
LDT_CODEC void unpack_block(const uint8_t* codes, int exponent,
                            typename Storage<kElement>::Type* data) {
  const Scale scale(exponent);
  uint8_t special = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    special |= uint8_t{(codes[i] & 0x7f) == 0x7f} | uint8_t{codes[i] == kNaN};
  }
  if (special == 0) {
    for (int64_t i = 0; i < kBlock; ++i) data[i] = narrow<kElement>(decode_finite(codes[i], scale));
  } else {
    for (int64_t i = 0; i < kBlock; ++i) data[i] = narrow<kElement>(decode(codes[i], scale));
  }
}

template <Element kElement>
LDT_CODEC void pack_all(const void* from, int64_t elements, uint8_t* packed) {
  using Type = typename Storage<kElement>::Type;
  const auto* data = static_cast<const Type*>(from);
  uint8_t* exponents = packed + elements;
  for (int64_t begin = 0; begin < elements; begin += kBlock, exponents += kExponentBytes) {
    const int64_t length = std::min(kBlock, elements - begin);
    if (length == kBlock) {
      store_exponent(exponents, pack_block<kElement>(data + begin, packed + begin));
      continue;
    }
    Type rest[kBlock] = {};
    uint8_t codes[kBlock];
    std::memcpy(rest, data + begin, static_cast<size_t>(length) * sizeof(Type));
    store_exponent(exponents, pack_block<kElement>(rest, codes));
    std::memcpy(packed + begin, codes, static_cast<size_t>(length));
  }
}

template <Element kElement>
LDT_CODEC void unpack_all(const uint8_t* packed, int64_t elements, void* to) {
  using Type = typename Storage<kElement>::Type;
  auto* data = static_cast<Type*>(to);
  const uint8_t* exponents = packed + elements;
  for (int64_t begin = 0; begin < elements; begin += kBlock, exponents += kExponentBytes) {
    const int64_t length = std::min(kBlock, elements - begin);
    if (length == kBlock) {
      unpack_block<kElement>(packed + begin, load_exponent(exponents), data + begin);
      continue;
    }
    uint8_t codes[kBlock] = {};
    Type rest[kBlock];
    std::memcpy(codes, packed + begin, static_cast<size_t>(length));
    unpack_block<kElement>(codes, load_exponent(exponents), rest);
    std::memcpy(data + begin, rest, static_cast<size_t>(length) * sizeof(Type));
  }
}

LDT_CODEC void pack_any(const void* data, Element element, int64_t elements, uint8_t* packed) {
  switch (element) {
    case Element::kFloat32: return pack_all<Element::kFloat32>(data, elements, packed);
    case Element::kBFloat16: return pack_all<Element::kBFloat16>(data, elements, packed);
    case Element::kFloat16: return pack_all<Element::kFloat16>(data, elements, packed);
  }
}

LDT_CODEC void unpack_any(const uint8_t* packed, Element element, int64_t elements, void* data) {
  switch (element) {
    case Element::kFloat32: return unpack_all<Element::kFloat32>(packed, elements, data);
    case Element::kBFloat16: return unpack_all<Element::kBFloat16>(packed, elements, data);
    case Element::kFloat16: return unpack_all<Element::kFloat16>(packed, elements, data);
  }
}

#ifdef LDT_AVX2
LDT_AVX2 void pack_avx2(const void* data, Element element, int64_t elements, uint8_t* packed) {
  pack_any(data, element, elements, packed);
}
LDT_AVX2 void unpack_avx2(const uint8_t* packed, Element element, int64_t elements, void* data) {
  unpack_any(packed, element, elements, data);
}
#endif

}  // namespace

void pack_host(const void* data, Element element, int64_t elements, uint8_t* packed) {
#ifdef LDT_AVX2
  if (__builtin_cpu_supports("avx2")) return pack_avx2(data, element, elements, packed);
#endif
  pack_any(data, element, elements, packed);
}

void unpack_host(const uint8_t* packed, Element element, int64_t elements, void* data) {
#ifdef LDT_AVX2
  if (__builtin_cpu_supports("avx2")) return unpack_avx2(packed, element, elements, data);
#endif
  unpack_any(packed, element, elements, data);
}

}  // namespace ldt::compression
