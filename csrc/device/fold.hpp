// Element-wise reduction over the ranks of a node, for device and host.  Results have the same bits
// as a node of the canonical reduction tree (collectives/reduce.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/types.hpp"
#include "device/kernel_bodies.hpp"

namespace r2ccl::device {

inline constexpr std::uint32_t most_local_peers = 16;

// ---- operators ----

struct Add {
  template <typename T>
  R2CCL_SHARED static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct Multiply {
  template <typename T>
  R2CCL_SHARED static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
};
struct Min {
  template <typename T>
  R2CCL_SHARED static T apply(T a, T b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <typename T>
  R2CCL_SHARED static T apply(T a, T b) {
    return a > b ? a : b;
  }
};
struct Or {
  template <typename T>
  R2CCL_SHARED static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct And {
  template <typename T>
  R2CCL_SHARED static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

// ---- formats: type of an element in memory, and type of the accumulator ----

template <typename To, typename From>
R2CCL_SHARED To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct F32Format {
  using Element = std::uint32_t;
  using Acc = float;
  R2CCL_SHARED static Acc load(Element bits) { return same_bits<float>(bits); }
  R2CCL_SHARED static Element store(Acc sum) {
    return sum != sum ? 0x7fc00000U : same_bits<std::uint32_t>(sum);
  }
};
struct F64Format {
  using Element = std::uint64_t;
  using Acc = double;
  R2CCL_SHARED static Acc load(Element bits) { return same_bits<double>(bits); }
  R2CCL_SHARED static Element store(Acc sum) {
    return sum != sum ? 0x7ff8000000000000U : same_bits<std::uint64_t>(sum);
  }
};

struct Bf16Format {
  using Element = std::uint16_t;
  using Acc = float;
  R2CCL_SHARED static Acc load(Element bits) {
    return same_bits<float>(static_cast<std::uint32_t>(bits) << 16U);
  }
  // Rounds to nearest even; a carry out of the mantissa gives infinity.
  R2CCL_SHARED static Element store(Acc sum) {
    const auto bits = same_bits<std::uint32_t>(sum);
    const std::uint32_t rounded = bits + 0x7fffU + ((bits >> 16U) & 1U);
    return static_cast<Element>((sum != sum ? 0x7fc00000U : rounded) >> 16U);
  }
};

struct F16Format {
  using Element = std::uint16_t;
  using Acc = float;
  R2CCL_SHARED static Acc load(Element bits) {
    const std::uint32_t magnitude = bits & 0x7fffU;
    std::uint32_t wide = (magnitude << 13U) + (112U << 23U);
    if (magnitude >= 0x7c00U) wide = (magnitude << 13U) + (224U << 23U);
    // A denormal has exactly the value of its mantissa bits times 2^-24.
    if (magnitude < 0x0400U)
      wide = same_bits<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
    return same_bits<float>(wide | ((bits & 0x8000U) << 16U));
  }
  R2CCL_SHARED static Element store(Acc sum) {
    const auto bits = same_bits<std::uint32_t>(sum);
    const std::uint32_t exact = bits & 0x7fffffffU;
    if (exact > 0x7f800000U) return 0x7e00U;
    // Values from 2^16 become infinity.  Values that round up to 2^16 become infinity by carry.
    const std::uint32_t magnitude = exact > 0x47800000U ? 0x47800000U : exact;
    std::uint32_t half = ((magnitude + 0x0fffU + ((magnitude >> 13U) & 1U)) >> 13U) - (112U << 10U);
    // Below 2^-14 the result counts units of 2^-24.  Adding 0.5 rounds to this unit, since a float
    // near 0.5 has steps of 2^-24.
    if (exact < 0x38800000U)
      half = same_bits<std::uint32_t>(same_bits<float>(magnitude) + 0.5F) - 0x3f000000U;
    return static_cast<Element>(half | ((bits >> 16U) & 0x8000U));
  }
};

// Wrapping integers, computed as unsigned.
template <typename Unsigned>
struct WrappingFormat {
  using Element = Unsigned;
  using Acc = Unsigned;
  R2CCL_SHARED static Acc load(Element value) { return value; }
  R2CCL_SHARED static Element store(Acc sum) { return sum; }
};
// Integers for min and max.
template <typename Unsigned, typename Integer>
struct ComparedFormat {
  using Element = Unsigned;
  using Acc = Integer;
  R2CCL_SHARED static Acc load(Element value) { return same_bits<Integer>(value); }
  R2CCL_SHARED static Element store(Acc sum) { return same_bits<Unsigned>(sum); }
};
// Floats for min and max, as integer keys in the order of the floats.  Negative zero is below
// positive zero.  NaN always wins: `lowest` places NaN below all numbers (for min), otherwise NaN
// is above all numbers.
template <typename Unsigned, typename Integer, Integer infinity, Integer quiet_nan, bool lowest>
struct OrderedFormat {
  using Element = Unsigned;
  using Acc = Integer;
  static constexpr Integer highest_key =
      static_cast<Integer>(static_cast<Unsigned>(~Unsigned{0}) >> 1U);
  static constexpr Integer lowest_key = static_cast<Integer>(~highest_key);

  R2CCL_SHARED static Integer mirrored(Integer bits) {
    return static_cast<Integer>(bits < 0 ? bits ^ highest_key : bits);
  }
  R2CCL_SHARED static Acc load(Element value) {
    const auto bits = same_bits<Integer>(value);
    if ((bits & highest_key) > infinity) return lowest ? lowest_key : highest_key;
    return mirrored(bits);
  }
  R2CCL_SHARED static Element store(Acc key) {
    const Integer bits = mirrored(key);
    return same_bits<Unsigned>((bits & highest_key) > infinity ? quiet_nan : bits);
  }
};
// Booleans: any byte except 0 is true; true is stored as 1.
struct BooleanFormat {
  using Element = std::uint8_t;
  using Acc = std::uint8_t;
  R2CCL_SHARED static Acc load(Element value) { return value != 0 ? 1 : 0; }
  R2CCL_SHARED static Element store(Acc sum) { return sum; }
};

// ---- reduction ----

struct Operands {
  const std::byte* of[most_local_peers];  // in tree order, each aligned to an element
  std::uint32_t ranks;
};

template <typename Element>
struct alignas(Vector) Lanes {
  Element of[sizeof(Vector) / sizeof(Element)];
};

// Reduces with all threads of all blocks, 16 bytes at a time if all addresses are aligned.
template <typename Format, typename Op>
R2CCL_SHARED void fold_all(const ThreadPosition& at, std::byte* out, const Operands& operands,
                           std::uint64_t bytes) {
  using Element = typename Format::Element;
  constexpr std::uint64_t lanes = sizeof(Vector) / sizeof(Element);
  const std::uint64_t count = bytes / sizeof(Element);
  auto addresses = reinterpret_cast<std::uintptr_t>(out);
  for (std::uint32_t rank = 0; rank < operands.ranks; ++rank)
    addresses |= reinterpret_cast<std::uintptr_t>(operands.of[rank]);
  const std::uint64_t first = std::uint64_t{at.block} * at.threads + at.thread;
  const std::uint64_t step = std::uint64_t{at.blocks} * at.threads;
  const std::uint64_t vectors = addresses % alignof(Vector) != 0 ? 0 : count / lanes;
  for (std::uint64_t v = first; v < vectors; v += step) {
    typename Format::Acc sums[lanes] = {};
    for (std::uint32_t rank = 0; rank < operands.ranks; ++rank) {
      const auto elements =
          same_bits<Lanes<Element>>(reinterpret_cast<const Vector*>(operands.of[rank])[v]);
      for (std::uint64_t i = 0; i < lanes; ++i) {
        const auto term = Format::load(elements.of[i]);
        sums[i] = rank == 0 ? term : Op::apply(sums[i], term);
      }
    }
    Lanes<Element> made;
    for (std::uint64_t i = 0; i < lanes; ++i) made.of[i] = Format::store(sums[i]);
    reinterpret_cast<Vector*>(out)[v] = same_bits<Vector>(made);
  }
  for (std::uint64_t i = vectors * lanes + first; i < count; i += step) {
    const auto term = [&](std::uint32_t rank) {
      return Format::load(reinterpret_cast<const Element*>(operands.of[rank])[i]);
    };
    auto sum = term(0);
    for (std::uint32_t rank = 1; rank < operands.ranks; ++rank) sum = Op::apply(sum, term(rank));
    reinterpret_cast<Element*>(out)[i] = Format::store(sum);
  }
}

template <typename Format, typename Minimum, typename Maximum>
R2CCL_SHARED void fold_numbers(const ThreadPosition& at, std::byte* out, const Operands& operands,
                               std::uint64_t bytes, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return fold_all<Format, Add>(at, out, operands, bytes);
    case ReduceOp::prod: return fold_all<Format, Multiply>(at, out, operands, bytes);
    case ReduceOp::min: return fold_all<Minimum, Min>(at, out, operands, bytes);
    case ReduceOp::max: return fold_all<Maximum, Max>(at, out, operands, bytes);
    case ReduceOp::avg: return;  // never launched: an average is divided once, at the end
  }
}
template <typename Format, typename Unsigned, typename Integer, Integer infinity, Integer nan>
R2CCL_SHARED void fold_floats(const ThreadPosition& at, std::byte* out, const Operands& operands,
                              std::uint64_t bytes, ReduceOp op) {
  fold_numbers<Format, OrderedFormat<Unsigned, Integer, infinity, nan, true>,
               OrderedFormat<Unsigned, Integer, infinity, nan, false>>(at, out, operands, bytes,
                                                                       op);
}
template <typename Unsigned, typename Integer>
R2CCL_SHARED void fold_integers(const ThreadPosition& at, std::byte* out, const Operands& operands,
                                std::uint64_t bytes, ReduceOp op) {
  fold_numbers<WrappingFormat<Unsigned>, ComparedFormat<Unsigned, Integer>,
               ComparedFormat<Unsigned, Integer>>(at, out, operands, bytes, op);
}

// Reduces elements of any type with any operator except avg.
R2CCL_SHARED void fold(const ThreadPosition& at, std::byte* out, const Operands& operands,
                       std::uint64_t bytes, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::f16:
      return fold_floats<F16Format, std::uint16_t, std::int16_t, 0x7c00, 0x7e00>(at, out, operands,
                                                                                 bytes, op);
    case DType::bf16:
      return fold_floats<Bf16Format, std::uint16_t, std::int16_t, 0x7f80, 0x7fc0>(at, out, operands,
                                                                                  bytes, op);
    case DType::f32:
      return fold_floats<F32Format, std::uint32_t, std::int32_t, 0x7f800000, 0x7fc00000>(
          at, out, operands, bytes, op);
    case DType::f64:
      return fold_floats<F64Format, std::uint64_t, std::int64_t, 0x7ff0000000000000,
                         0x7ff8000000000000>(at, out, operands, bytes, op);
    case DType::i8: return fold_integers<std::uint8_t, std::int8_t>(at, out, operands, bytes, op);
    case DType::u8: return fold_integers<std::uint8_t, std::uint8_t>(at, out, operands, bytes, op);
    case DType::i32:
      return fold_integers<std::uint32_t, std::int32_t>(at, out, operands, bytes, op);
    case DType::i64:
      return fold_integers<std::uint64_t, std::int64_t>(at, out, operands, bytes, op);
    case DType::boolean:
      return op == ReduceOp::sum || op == ReduceOp::max
                 ? fold_all<BooleanFormat, Or>(at, out, operands, bytes)
                 : fold_all<BooleanFormat, And>(at, out, operands, bytes);
  }
}

// A reduction of operands in tree order, `pitch` bytes apart. operands = 0: nothing to reduce.
struct Reduction {
  std::uint32_t operands = 0;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  std::uint64_t pitch = 0;
};

// Writes the reduction of the operands at `from`, or a copy of the data there if there is nothing
// to reduce.
R2CCL_SHARED void reduce_or_copy(const ThreadPosition& at, std::byte* out, const std::byte* from,
                                 std::uint64_t bytes, const Reduction& reduction) {
  if (reduction.operands == 0) return copy(at, out, from, bytes);
  Operands operands{};
  operands.ranks = reduction.operands;
  for (std::uint32_t i = 0; i < reduction.operands; ++i)
    operands.of[i] = from + i * reduction.pitch;
  fold(at, out, operands, bytes, reduction.dtype, reduction.op);
}

}  // namespace r2ccl::device
