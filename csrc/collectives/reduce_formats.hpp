// Formats of element types: load into vector registers, combine and store.  Only reduce_kernels.hpp
// includes this file, once per instruction set; the macros are described there.
//
// Members of a format: Acc (accumulator), vector_bytes (bytes of memory per Acc), element_bytes,
// rounds (true if memory is narrower than Acc), load, store, round, divide, apply<Op>.
//
// Vectors are the built-in vector types of the compiler.  The same source compiles to SSE2, NEON,
// AVX2 or AVX-512 at any optimisation level, and IEEE 754 gives every width the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if R2CCL_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#define R2CCL_INLINE [[gnu::always_inline]] static inline

namespace r2ccl::R2CCL_ISA {
namespace {

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(R2CCL_VECTOR_BYTES)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

using VF32 = Vector<float>;
using VU32 = Vector<std::uint32_t>;
using VI32 = Vector<std::int32_t>;

template <typename V>
R2CCL_INLINE V load_vector(const std::byte* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <typename V>
R2CCL_INLINE void store_vector(std::byte* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

struct Add {
  template <typename V>
  R2CCL_INLINE V apply(V a, V b) {
    return a + b;
  }
};
struct Multiply {
  template <typename V>
  R2CCL_INLINE V apply(V a, V b) {
    return a * b;
  }
};
struct Min {
  template <typename V>
  R2CCL_INLINE V apply(V a, V b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <typename V>
  R2CCL_INLINE V apply(V a, V b) {
    return a > b ? a : b;
  }
};
struct Or {
  template <typename V>
  R2CCL_INLINE V apply(V a, V b) {
    return a | b;
  }
};
struct And {
  template <typename V>
  R2CCL_INLINE V apply(V a, V b) {
    return a & b;
  }
};

// Base of formats with a single vector of whole elements as Acc.
template <typename T>
struct PlainFormat {
  using Acc = Vector<T>;
  static constexpr std::size_t vector_bytes = R2CCL_VECTOR_BYTES;
  static constexpr std::size_t element_bytes = sizeof(T);
  static constexpr bool rounds = false;

  R2CCL_INLINE Acc load(const std::byte* from) { return load_vector<Acc>(from); }
  R2CCL_INLINE void store(std::byte* to, Acc value) { store_vector(to, value); }
  R2CCL_INLINE Acc round(Acc value) { return value; }
  template <typename Op>
  R2CCL_INLINE Acc apply(Acc a, Acc b) {
    return Op::apply(a, b);
  }
};

// Replaces every NaN by the canonical quiet NaN.  The sign of inf - inf differs between x86 and
// other processors, and the surviving payload of a NaN operand depends on the instruction.
R2CCL_INLINE VF32 one_nan(VF32 value) {
  return value != value ? reinterpret_cast<VF32>(VU32{} + 0x7fc00000u) : value;
}
R2CCL_INLINE Vector<double> one_nan(Vector<double> value) {
  const auto quiet = Vector<std::uint64_t>{} + std::uint64_t{0x7ff8000000000000};
  return value != value ? reinterpret_cast<Vector<double>>(quiet) : value;
}

// f32 and f64: sum, prod, avg.
template <typename T>
struct FloatFormat : PlainFormat<T> {
  using Acc = Vector<T>;
  R2CCL_INLINE void store(std::byte* to, Acc value) { store_vector(to, one_nan(value)); }
  R2CCL_INLINE Acc divide(Acc value, std::size_t ranks) { return value / static_cast<T>(ranks); }
};

// Integers.  Arithmetic is unsigned for defined wrapping; the signedness of T selects the division.
template <typename T>
struct WrappingFormat : PlainFormat<std::make_unsigned_t<T>> {
  using Unsigned = std::make_unsigned_t<T>;
  using Acc = Vector<Unsigned>;
  // Divides lane by lane: no processor divides integer vectors, and `ranks` may not fit in T.
  R2CCL_INLINE Acc divide(Acc value, std::size_t ranks) {
    for (std::size_t lane = 0; lane < sizeof(Acc) / sizeof(T); ++lane) {
      const auto wide = static_cast<std::int64_t>(static_cast<T>(value[lane]));
      value[lane] = static_cast<Unsigned>(wide / static_cast<std::int64_t>(ranks));
    }
    return value;
  }
};

// Floats for min and max, mapped to integers of the same order.  Negative numbers are mirrored, so
// -0 sorts directly below +0.  NaN maps to the winning extreme of the operation.  The mapping needs
// no rounding, so f16 and bf16 skip fp32.  Bits is the signed integer type of the float's size.
template <typename Bits, Bits infinity, Bits quiet_nan, typename Op>
struct OrderedFormat : PlainFormat<Bits> {
  using Acc = Vector<Bits>;
  static constexpr Bits sign_bit = std::is_same_v<Bits, std::int16_t>   ? 15
                                   : std::is_same_v<Bits, std::int32_t> ? 31
                                                                        : 63;
  static constexpr Bits lowest_bits = static_cast<Bits>(std::uint64_t{1} << sign_bit);
  static constexpr Bits highest_bits = static_cast<Bits>(~lowest_bits);
  static constexpr Bits nan_key = std::is_same_v<Op, Min> ? lowest_bits : highest_bits;

  R2CCL_INLINE Acc mirror(Acc bits) { return bits ^ ((bits >> sign_bit) & highest_bits); }
  R2CCL_INLINE Acc replace_nan(Acc bits, Acc value, Bits nan) {
    return (bits & highest_bits) > infinity ? Acc{} + nan : value;
  }
  R2CCL_INLINE Acc load(const std::byte* from) {
    const Acc bits = load_vector<Acc>(from);
    return replace_nan(bits, mirror(bits), nan_key);
  }
  R2CCL_INLINE void store(std::byte* to, Acc key) {
    const Acc bits = mirror(key);
    store_vector(to, replace_nan(bits, bits, quiet_nan));
  }
};

// Booleans: any nonzero byte is true; a result of true is stored as 1.
struct BooleanFormat : PlainFormat<std::uint8_t> {
  R2CCL_INLINE Acc load(const std::byte* from) {
    return reinterpret_cast<Acc>(load_vector<Acc>(from) != Acc{});
  }
  R2CCL_INLINE void store(std::byte* to, Acc mask) { store_vector(to, mask & std::uint8_t{1}); }
};

// 16-bit floats in pairs.  Shift and mask turn the two halves of each 32-bit word into two fp32
// vectors without moving lanes.
template <typename Code>
struct PairedFormat {
  struct Acc {
    VF32 low, high;
  };
  static constexpr std::size_t vector_bytes = R2CCL_VECTOR_BYTES;
  static constexpr std::size_t element_bytes = 2;
  static constexpr bool rounds = true;

  R2CCL_INLINE Acc widen(VU32 words) { return {Code::widen_low(words), Code::widen_high(words)}; }
  R2CCL_INLINE Acc load(const std::byte* from) { return widen(load_vector<VU32>(from)); }
  R2CCL_INLINE void store(std::byte* to, Acc value) {
    store_vector(to, Code::narrow(value.low, value.high));
  }
  R2CCL_INLINE Acc round(Acc value) { return widen(Code::narrow(value.low, value.high)); }
  R2CCL_INLINE Acc divide(Acc value, std::size_t ranks) {
    const auto divisor = static_cast<float>(ranks);
    return {value.low / divisor, value.high / divisor};
  }
  template <typename Op>
  R2CCL_INLINE Acc apply(Acc a, Acc b) {
    return {Op::apply(a.low, b.low), Op::apply(a.high, b.high)};
  }
};

// bf16 by integer arithmetic: the AVX512_BF16 conversion is not used, since it flushes denormals.
struct Bf16Code {
  R2CCL_INLINE VF32 widen_low(VU32 words) { return reinterpret_cast<VF32>(words << 16u); }
  R2CCL_INLINE VF32 widen_high(VU32 words) { return reinterpret_cast<VF32>(words & 0xffff0000u); }
  // Rounds to nearest even, into the upper half of each word.  A mantissa carry gives infinity.
  R2CCL_INLINE VU32 nearest(VF32 value) {
    const VU32 bits = reinterpret_cast<VU32>(value);
    const VU32 rounded = bits + 0x7fffu + ((bits >> 16u) & 1u);
    return value != value ? VU32{} + 0x7fc00000u : rounded;
  }
  R2CCL_INLINE VU32 narrow(VF32 low, VF32 high) {
    return (nearest(low) >> 16u) | (nearest(high) & 0xffff0000u);
  }
};
using Bf16Format = PairedFormat<Bf16Code>;

#if R2CCL_VECTOR_BYTES > 16

// f16 converted by the processor.  F16C and AVX-512 keep denormals regardless of MXCSR.
struct F16Format {
  using Acc = VF32;
  static constexpr std::size_t vector_bytes = R2CCL_VECTOR_BYTES / 2;
  static constexpr std::size_t element_bytes = 2;
  static constexpr bool rounds = true;

#if R2CCL_VECTOR_BYTES == 64
  using Half = __m256i;
  // Masked intrinsics with all lanes on: g++ 12 reports an uninitialised register in plain forms.
  static constexpr __mmask16 all_lanes = 0xffff;

  R2CCL_INLINE VF32 widen(Half half) {
    return reinterpret_cast<VF32>(_mm512_maskz_cvtph_ps(all_lanes, half));
  }
  R2CCL_INLINE Half narrow(VF32 value) {
    return _mm512_maskz_cvtps_ph(all_lanes, reinterpret_cast<__m512>(one_nan(value)),
                                 _MM_FROUND_TO_NEAREST_INT);
  }
#else
  using Half = __m128i;

  R2CCL_INLINE VF32 widen(Half half) { return reinterpret_cast<VF32>(_mm256_cvtph_ps(half)); }
  R2CCL_INLINE Half narrow(VF32 value) {
    return _mm256_cvtps_ph(reinterpret_cast<__m256>(one_nan(value)), _MM_FROUND_TO_NEAREST_INT);
  }
#endif

  R2CCL_INLINE Acc load(const std::byte* from) {
    Half half;
    __builtin_memcpy(&half, from, sizeof half);
    return widen(half);
  }
  R2CCL_INLINE void store(std::byte* to, Acc value) {
    const Half half = narrow(value);
    __builtin_memcpy(to, &half, sizeof half);
  }
  R2CCL_INLINE Acc round(Acc value) { return widen(narrow(value)); }
  R2CCL_INLINE Acc divide(Acc value, std::size_t ranks) {
    return value / static_cast<float>(ranks);
  }
  template <typename Op>
  R2CCL_INLINE Acc apply(Acc a, Acc b) {
    return Op::apply(a, b);
  }
};

#else

// f16 by integer arithmetic, with the same result bits as the processor's conversion.
struct F16Code {
  R2CCL_INLINE VF32 widen_low(VU32 words) { return widen(words & 0xffffu); }
  R2CCL_INLINE VF32 widen_high(VU32 words) { return widen(words >> 16u); }
  R2CCL_INLINE VU32 narrow(VF32 low, VF32 high) {
    return narrow_one(low) | (narrow_one(high) << 16u);
  }

  R2CCL_INLINE VF32 widen(VU32 bits) {
    const VU32 magnitude = bits & 0x7fffu;
    // Rebias the exponent by 127 - 15.  Infinity and NaN map to the top of the fp32 range.
    const VU32 normal = (magnitude << 13u) + (112u << 23u);
    const VU32 top = (magnitude << 13u) + (224u << 23u);
    // A denormal equals the magnitude as an integer times 2^-24, exactly.
    const VI32 integer = reinterpret_cast<VI32>(magnitude);
    const VF32 denormal = __builtin_convertvector(integer, VF32) * 0x1p-24f;
    VU32 result = integer >= 0x7c00 ? top : normal;
    result = integer < 0x0400 ? reinterpret_cast<VU32>(denormal) : result;
    return reinterpret_cast<VF32>(result | ((bits & 0x8000u) << 16u));
  }
  R2CCL_INLINE VU32 narrow_one(VF32 value) {
    const VU32 bits = reinterpret_cast<VU32>(value);
    // Without the sign bit the value is non-negative; SSE2 compares signed integers only.
    const VI32 exact = reinterpret_cast<VI32>(bits & 0x7fffffffu);
    // Values of 2^16 and above become infinity.  Values rounded up to 2^16 reach infinity by carry.
    const VU32 magnitude = reinterpret_cast<VU32>(exact > 0x47800000 ? VI32{} + 0x47800000 : exact);
    const VU32 normal = ((magnitude + 0x0fffu + ((magnitude >> 13u) & 1u)) >> 13u) - (112u << 10u);
    // Below 2^-14 the result counts units of 2^-24.  fp32 values from 0.5 to 1 have this spacing,
    // so adding 0.5 rounds to whole units.
    const VF32 shifted = reinterpret_cast<VF32>(magnitude) + 0.5f;
    const VU32 denormal = reinterpret_cast<VU32>(shifted) - 0x3f000000u;
    VU32 result = exact < 0x38800000 ? denormal : normal;
    result |= (bits >> 16u) & 0x8000u;
    return exact > 0x7f800000 ? VU32{} + 0x7e00u : result;
  }
};
using F16Format = PairedFormat<F16Code>;

#endif

}  // namespace
}  // namespace r2ccl::R2CCL_ISA
