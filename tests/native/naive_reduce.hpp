// The canonical reduction, implemented a second time for tests: element by element, with
// conversions in double arithmetic instead of bit tricks.  It shares only the interface types with
// csrc/collectives.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "collectives/reduce.hpp"

namespace r2ccl::naive {

using Bytes = std::vector<std::byte>;

inline constexpr DType all_dtypes[] = {DType::f16, DType::bf16, DType::f32,
                                       DType::f64, DType::i8,   DType::u8,
                                       DType::i32, DType::i64,  DType::boolean};
inline constexpr ReduceOp all_ops[] = {ReduceOp::sum, ReduceOp::prod, ReduceOp::min, ReduceOp::max,
                                       ReduceOp::avg};

// All pairs except avg of bool, because callers reject this pair.
inline std::vector<std::pair<DType, ReduceOp>> every_kind() {
  std::vector<std::pair<DType, ReduceOp>> kinds;
  for (const DType dtype : all_dtypes) {
    for (const ReduceOp op : all_ops) {
      if (dtype != DType::boolean || op != ReduceOp::avg) kinds.emplace_back(dtype, op);
    }
  }
  return kinds;
}

// Rounds to the nearest multiple of 2^(exponent - fraction_bits), ties to even. 2^exponent is the
// leading bit of the value, or the format's smallest normal exponent if the value is smaller.
inline double to_precision(double value, int fraction_bits, int smallest_exponent) {
  const int exponent =
      value == 0 ? smallest_exponent : std::max(std::ilogb(value), smallest_exponent);
  const double place = std::ldexp(1.0, exponent - fraction_bits);
  return std::nearbyint(value / place) * place;
}

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

inline float widen(Half half) {
  const int exponent = (half.bits >> 10) & 31;
  const int fraction = half.bits & 1023;
  double value = 0;
  if (exponent == 31) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else {
    value = std::ldexp(1024 + fraction, exponent - 25);
  }
  return static_cast<float>((half.bits & 0x8000) != 0 ? -value : value);
}

inline Half narrow_half(float wide) {
  if (std::isnan(wide)) return {0x7e00};
  const int sign = std::signbit(wide) ? 0x8000 : 0;
  const double value = to_precision(std::fabs(static_cast<double>(wide)), 10, -14);
  int bits = 0x7c00;
  if (value < std::ldexp(1.0, -14)) {
    bits = static_cast<int>(std::ldexp(value, 24));
  } else if (value < 65536.0) {
    const int exponent = std::ilogb(value);
    bits = (exponent + 15) * 1024 + static_cast<int>(std::ldexp(value, 10 - exponent)) - 1024;
  }
  return {static_cast<std::uint16_t>(sign | bits)};
}

inline float widen(Brain brain) {
  const std::uint32_t bits = std::uint32_t{brain.bits} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline Brain narrow_brain(float wide) {
  if (std::isnan(wide)) return {0x7fc0};
  if (std::isinf(wide)) return {static_cast<std::uint16_t>(wide > 0 ? 0x7f80 : 0xff80)};
  const double value = to_precision(std::fabs(static_cast<double>(wide)), 7, -126);
  const double largest = std::ldexp(1.0, 128);
  const float rounded =
      value >= largest ? std::numeric_limits<float>::infinity() : static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &rounded, sizeof bits);
  return {static_cast<std::uint16_t>((bits >> 16) | (std::signbit(wide) ? 0x8000u : 0u))};
}

// Rules to load, accumulate and store a dtype.
template <typename T>
struct Rules {
  using Acc = T;
  static Acc load(T value) { return value; }
  static T store(Acc value) {
    if constexpr (std::is_floating_point_v<T>) {
      // On all supported platforms quiet_NaN() is the positive quiet NaN without payload.
      if (std::isnan(value)) return std::numeric_limits<T>::quiet_NaN();
    }
    return value;
  }
};
template <>
struct Rules<Half> {
  using Acc = float;
  static Acc load(Half value) { return widen(value); }
  static Half store(Acc value) { return narrow_half(value); }
};
template <>
struct Rules<Brain> {
  using Acc = float;
  static Acc load(Brain value) { return widen(value); }
  static Brain store(Acc value) { return narrow_brain(value); }
};
template <>
struct Rules<bool> {
  using Acc = bool;
  static Acc load(std::uint8_t value) { return value != 0; }
  static std::uint8_t store(Acc value) { return value ? 1 : 0; }
};

template <typename Acc>
Acc combine(ReduceOp op, Acc a, Acc b) {
  if constexpr (std::is_same_v<Acc, bool>) {
    return op == ReduceOp::sum || op == ReduceOp::max ? a || b : a && b;
  } else if constexpr (std::is_floating_point_v<Acc>) {
    if (op == ReduceOp::sum || op == ReduceOp::avg) return a + b;
    if (op == ReduceOp::prod) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<Acc>::quiet_NaN();
    const bool a_below = a < b || (a == b && std::signbit(a) && !std::signbit(b));
    return (op == ReduceOp::min) == a_below ? a : b;
  } else {
    if (op == ReduceOp::min) return a < b ? a : b;
    if (op == ReduceOp::max) return a > b ? a : b;
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
    return static_cast<Acc>(op == ReduceOp::prod ? x * y : x + y);
  }
}

template <typename T, typename Stored = T>
Bytes reduce_as(ReduceOp op, std::span<const Bytes> inputs, const ReductionTree& tree,
                std::size_t count) {
  using Rule = Rules<T>;
  using Acc = typename Rule::Acc;
  Bytes out(count * sizeof(Stored));
  for (std::size_t i = 0; i < count; ++i) {
    const auto element = [&](std::size_t position) {
      Stored value;
      std::memcpy(&value, inputs[tree.order[position]].data() + i * sizeof(Stored), sizeof value);
      return Rule::load(value);
    };
    Acc total{};
    std::size_t position = 0;
    for (std::size_t node = 0; node < tree.node_sizes.size(); ++node) {
      const std::size_t end = position + tree.node_sizes[node];
      const bool several = tree.node_sizes[node] > 1;
      Acc partial = element(position++);
      while (position < end) partial = combine(op, partial, element(position++));
      if (several) partial = Rule::load(Rule::store(partial));
      total = node == 0 ? partial : combine(op, total, partial);
    }
    if constexpr (!std::is_same_v<Acc, bool>) {
      if (op == ReduceOp::avg) {
        if constexpr (std::is_floating_point_v<Acc>) {
          total = total / static_cast<Acc>(tree.order.size());
        } else {
          total = static_cast<Acc>(static_cast<std::int64_t>(total) /
                                   static_cast<std::int64_t>(tree.order.size()));
        }
      }
    }
    const Stored result = Rule::store(total);
    std::memcpy(out.data() + i * sizeof(Stored), &result, sizeof result);
  }
  return out;
}

// Reduces inputs[rank], with the arguments of r2ccl::reduce().
inline Bytes reduce(DType dtype, ReduceOp op, std::span<const Bytes> inputs,
                    const ReductionTree& tree, std::size_t count) {
  switch (dtype) {
    case DType::f16: return reduce_as<Half>(op, inputs, tree, count);
    case DType::bf16: return reduce_as<Brain>(op, inputs, tree, count);
    case DType::f32: return reduce_as<float>(op, inputs, tree, count);
    case DType::f64: return reduce_as<double>(op, inputs, tree, count);
    case DType::i8: return reduce_as<std::int8_t>(op, inputs, tree, count);
    case DType::u8: return reduce_as<std::uint8_t>(op, inputs, tree, count);
    case DType::i32: return reduce_as<std::int32_t>(op, inputs, tree, count);
    case DType::i64: return reduce_as<std::int64_t>(op, inputs, tree, count);
    case DType::boolean: return reduce_as<bool, std::uint8_t>(op, inputs, tree, count);
  }
  return {};
}

// Random elements for all critical combinations: raw bits (every exponent, many NaNs), values near
// 1 (rounding), extremes (overflow, inf - inf), zeros of both signs, denormals.
inline Bytes random_elements(DType dtype, std::size_t count, std::mt19937_64& random) {
  const std::size_t size = size_of(dtype);
  const bool floating =
      dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
  const int width = static_cast<int>(size * 8);
  const int fraction = dtype == DType::f16    ? 10
                       : dtype == DType::bf16 ? 7
                       : dtype == DType::f32  ? 23
                                              : 52;
  Bytes bytes(count * size);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = random();
    if (floating) {
      const std::uint64_t sign = (random() & 1) << (width - 1);
      const std::uint64_t mantissa = random() & ((std::uint64_t{1} << fraction) - 1);
      const std::uint64_t top = (std::uint64_t{1} << (width - 1 - fraction)) - 1;
      const std::uint64_t bias = top / 2;
      switch (random() % 10) {
        case 0: break;
        case 1: bits = sign; break;
        case 2: bits = sign | mantissa; break;
        case 3: bits = sign | top << fraction; break;
        case 4: bits = sign | (top - 1) << fraction | mantissa; break;
        case 5: bits = sign | std::uint64_t{1} << fraction | mantissa; break;
        default: bits = sign | (bias - 2 + random() % 4) << fraction | mantissa; break;
      }
    } else if (dtype == DType::boolean && random() % 2 == 0) {
      bits = 0;
    } else if (random() % 4 == 0) {
      bits = random() % 2 == 0 ? std::uint64_t{1} << (width - 1) : ~std::uint64_t{0};
    }
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}

}  // namespace r2ccl::naive
