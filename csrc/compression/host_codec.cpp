// Loops over one block each, which compilers vectorize; compiled twice for x86-64, as SSE2 lacks
// much.
#include "compression/host_codec.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

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

/// Blocks of 16 bit elements that are 0 or at least 2^-6 of the scale, and finite, which nearly all
/// blocks are. There codes are the bits of elements but for the offset of the exponent and the
/// length of the mantissa: integer arithmetic, with twice as many lanes of vector units.
template <Element kElement>
class ShortBlock {
 public:
  LDT_CODEC explicit ShortBlock(int exponent)
      : is_in_range_(exponent > 6 - kBias && exponent <= kBias - 8),
        offset_(static_cast<uint16_t>((exponent + kBias - 7) * (1 << kMantissa))) {}

  /// False, and `codes` undefined, for any other block. The same for unpack().
  LDT_CODEC bool pack(const uint16_t* data, uint8_t* codes) const {
    if (!is_in_range_) return false;
    const auto least = static_cast<int16_t>(offset_ + (1 << kMantissa));
    uint16_t has_small = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      const auto magnitude = static_cast<int16_t>(data[i] & 0x7fff);
      has_small |= static_cast<uint16_t>(uint16_t{magnitude != 0} & uint16_t{magnitude < least});
    }
    if (has_small) return false;
    for (int64_t i = 0; i < kBlock; ++i) {
      const auto magnitude = static_cast<uint16_t>(data[i] & 0x7fff);
      const auto bits = static_cast<uint16_t>(magnitude - offset_);
      const auto is_odd = static_cast<uint16_t>((bits >> kDropped) & 1);
      const auto rounded = static_cast<uint16_t>(bits + kBelowHalf + is_odd);  // ties to even
      const auto code = static_cast<uint16_t>((rounded >> kDropped) | ((data[i] >> 8) & 0x80));
      codes[i] = static_cast<uint8_t>(magnitude == 0 ? 0 : code);
    }
    return true;
  }

  LDT_CODEC bool unpack(const uint8_t* codes, uint16_t* data) const {
    if (!is_in_range_) return false;
    uint8_t has_others = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      const auto magnitude = static_cast<uint8_t>(codes[i] & 0x7f);
      const auto before = static_cast<uint8_t>(magnitude - 1);  // 0 wraps around
      has_others |= uint8_t{before < 7} | uint8_t{magnitude == 0x7f} | uint8_t{codes[i] == kNaN};
    }
    if (has_others) return false;
    for (int64_t i = 0; i < kBlock; ++i) {
      const auto magnitude = static_cast<uint16_t>(codes[i] & 0x7f);
      const auto bits = static_cast<uint16_t>((magnitude << kDropped) + offset_);
      const auto sign = static_cast<uint16_t>((codes[i] & 0x80) << 8);
      data[i] = magnitude == 0 ? uint16_t{0} : static_cast<uint16_t>(bits | sign);
    }
    return true;
  }

 private:
  static constexpr int kMantissa = kElement == Element::kBFloat16 ? 7 : 10;
  static constexpr int kBias = kElement == Element::kBFloat16 ? 127 : 15;
  static constexpr int kDropped = kMantissa - 3;
  static constexpr int kBelowHalf = (1 << (kDropped - 1)) - 1;

  const bool is_in_range_;  // all such elements are normal numbers
  const uint16_t offset_;   // of the bits of an element from those of its code
};

/// The bits of the largest magnitude of a block, as float32.
template <Element kElement>
LDT_CODEC uint32_t largest_magnitude(const typename Storage<kElement>::Type* data) {
  using Type = typename Storage<kElement>::Type;
  using Signed = std::make_signed_t<Type>;  // vector units of x86 compare signed numbers
  Signed largest = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const auto magnitude = static_cast<Signed>(data[i] & std::numeric_limits<Signed>::max());
    largest = std::max(largest, magnitude);
  }
  return widen<kElement>(static_cast<Type>(largest));
}

/// Packs one block and returns its exponent.
template <Element kElement>
LDT_CODEC int pack_block(const typename Storage<kElement>::Type* data, uint8_t* codes) {
  uint32_t largest = largest_magnitude<kElement>(data);
  const bool is_finite = largest < kInfinity;
  int exponent = exponent_of(largest);
  if constexpr (kElement != Element::kFloat32) {
    if (is_finite && ShortBlock<kElement>(exponent).pack(data, codes)) return exponent;
  }
  uint32_t widened[kBlock];
  const uint32_t* bits = widened;
  if constexpr (kElement == Element::kFloat32) {
    bits = data;
  } else {
    for (int64_t i = 0; i < kBlock; ++i) widened[i] = widen<kElement>(data[i]);
  }
  if (!is_finite) {
    int32_t finite = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      finite = std::max(finite, static_cast<int32_t>(finite_magnitude(bits[i])));
    }
    exponent = exponent_of(static_cast<uint32_t>(finite));
  }
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
  if constexpr (kElement != Element::kFloat32) {
    if (ShortBlock<kElement>(exponent).unpack(codes, data)) return;
  }
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
