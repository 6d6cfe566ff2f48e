// The 8 bit format (docs/wire_format.md): fp8 e4m3 in blocks with a power of two as scale. Included
// by the host and by kernels. All arithmetic is exact but the rounding to a code, so both give
// equal bytes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define LDT_CODEC __host__ __device__ inline
#else
#define LDT_CODEC __attribute__((always_inline)) inline
#endif

namespace ldt::compression {

constexpr int64_t kBlock = 128;     // elements that share a scale
constexpr int kExponentBytes = 2;   // int16, little endian; the scale of a block is 2^exponent
constexpr int kMinExponent = -140;  // e4m3 has steps of 2^-9: every float32 is a multiple of 2^-149
constexpr int kMaxExponent = 120;   // of a block whose largest element is near 2^128
constexpr uint32_t kInfinity = 0x7f800000;

// Codes that e4m3 gives to NaN and -0.
constexpr uint32_t kPlusInfinity = 0x7f;
constexpr uint32_t kMinusInfinity = 0xff;
constexpr uint32_t kNaN = 0x80;
constexpr uint32_t kLargestCode = 0x7e;  // 448

enum class Element : uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }
/// Codes come first, the exponents of all blocks behind them.
constexpr int64_t packed_bytes(int64_t elements) {
  return elements + kExponentBytes * blocks_of(elements);
}

LDT_CODEC float as_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

LDT_CODEC uint32_t as_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

/// `yes` if condition, else `no`, without a branch: so that compilers vectorize loops of it.
LDT_CODEC uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  return no ^ ((yes ^ no) & (0U - static_cast<uint32_t>(condition)));
}

/// Compares numbers below 2^31; vector units of x86 compare signed ones.
LDT_CODEC bool below(uint32_t left, uint32_t right) {
  return static_cast<int32_t>(left) < static_cast<int32_t>(right);
}

/// 2^exponent for -126 <= exponent <= 127.
LDT_CODEC float power_of_two(int exponent) {
  return as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

/// Multiplies by 2^exponent in two steps, as neither 2^140 nor 2^-140 is a float.
struct Scale {
  float first;
  float second;

  LDT_CODEC explicit Scale(int exponent)
      : first(power_of_two(exponent / 2)), second(power_of_two(exponent - exponent / 2)) {}
  LDT_CODEC float times(float value) const { return value * first * second; }
};

/// The bits of the float32 that equals an element.
LDT_CODEC uint32_t widen_half(uint32_t half) {
  const uint32_t magnitude = half & 0x7fff;
  const uint32_t sign = (half & 0x8000) << 16;
  const uint32_t small = as_bits(as_float(0x3f000000 | magnitude) - 0.5F);  // steps of 2^-24
  const uint32_t normal = (magnitude << 13) + (112U << 23);
  const uint32_t special = kInfinity | (magnitude << 13);
  return sign |
         select(below(magnitude, 0x400), small, select(below(magnitude, 0x7c00), normal, special));
}

/// The float16 that equals a decoded float32: decoded elements are float16 if the packed ones were.
LDT_CODEC uint32_t narrow_half(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t small = as_bits(as_float(magnitude) + 0.5F) - 0x3f000000;
  const uint32_t normal = (magnitude - (112U << 23)) >> 13;
  const uint32_t special = select(below(kInfinity, magnitude), 0x7e00, 0x7c00);
  return sign | select(below(magnitude, 113U << 23), small,
                       select(below(magnitude, kInfinity), normal, special));
}

/// The magnitude of an element if it is finite, else 0.
LDT_CODEC uint32_t finite_magnitude(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffff;
  return select(below(magnitude, kInfinity), magnitude, 0);
}

/// The exponent of a block: the smallest with `largest` <= 448 * 2^exponent; 0 for a block of
/// zeros.
LDT_CODEC int exponent_of(uint32_t largest) {
  if (largest == 0) return 0;
  int exponent = static_cast<int>(largest >> 23) - 127;
  if (largest < 0x800000) {  // a denormal number
    for (exponent = -126; largest < 0x800000; largest <<= 1) --exponent;
  }
  exponent -= (largest & 0x7fffff) <= 0x600000 ? 8 : 7;
  return exponent < kMinExponent ? kMinExponent : exponent;
}

/// The largest code of a block: 448, or 240 where 256 would be infinite in the type of the
/// elements.
LDT_CODEC uint32_t largest_code(int exponent, Element element) {
  return exponent == (element == Element::kFloat16 ? 8 : kMaxExponent) ? 0x77 : kLargestCode;
}

/// The code of a magnitude, to the nearest of 4 significant bits, or of steps of 2^-9 below 2^-6;
/// to the even one if two are. `scale` is that of minus the block's exponent.
LDT_CODEC uint32_t encode_magnitude(uint32_t magnitude, const Scale& scale) {
  const uint32_t scaled = as_bits(scale.times(as_float(magnitude)));
  const uint32_t normal = ((scaled + (0x7ffff - (120U << 23)) + ((scaled >> 20) & 1)) >> 20) & 0x7f;
  const uint32_t small = as_bits(as_float(scaled) + 16384.0F) & 0x7f;
  return select(below(scaled, 121U << 23), small, normal);
}

/// The code of any element of a block; `largest` is that of largest_code.
LDT_CODEC uint32_t encode(uint32_t bits, const Scale& scale, uint32_t largest) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 24) & 0x80;
  uint32_t code = encode_magnitude(magnitude, scale);
  code = select(below(code, largest), code, largest);
  code = select(code == 0, 0, code | sign);
  const uint32_t special = select(magnitude == kInfinity, kPlusInfinity | sign, kNaN);
  return select(below(magnitude, kInfinity), code, special);
}

/// The bits of the float32 of a finite code. `scale` is that of the block's exponent.
LDT_CODEC uint32_t decode_finite(uint32_t code, const Scale& scale) {
  const uint32_t magnitude = code & 0x7f;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9F;
  const uint32_t normal = (magnitude << 20) + (120U << 23);
  const uint32_t unscaled = select(below(magnitude, 8), as_bits(small), normal);
  return as_bits(scale.times(as_float(unscaled))) | (code & 0x80) << 24;
}

/// The bits of the float32 of any code.
LDT_CODEC uint32_t decode(uint32_t code, const Scale& scale) {
  const uint32_t infinity = kInfinity | (code & 0x80) << 24;
  const uint32_t value =
      select((code & 0x7f) == kPlusInfinity, infinity, decode_finite(code, scale));
  return select(code == kNaN, 0x7fc00000, value);
}

LDT_CODEC void store_exponent(uint8_t* to, int exponent) {
  to[0] = static_cast<uint8_t>(exponent & 0xff);
  to[1] = static_cast<uint8_t>((exponent >> 8) & 0xff);
}

/// What is no exponent of a block becomes the nearest one.
LDT_CODEC int load_exponent(const uint8_t* from) {
  const int exponent = static_cast<int16_t>(static_cast<uint16_t>(from[0] | (from[1] << 8)));
  return exponent < kMinExponent ? kMinExponent : exponent > kMaxExponent ? kMaxExponent : exponent;
}

}  // namespace ldt::compression
