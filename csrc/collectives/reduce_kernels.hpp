// The reduction kernels, compiled once per instruction set.  The including file defines R2CCL_ISA
// (a separate namespace) and R2CCL_VECTOR_BYTES (16, 32 or 64).
//
// All functions have internal linkage and call no inline function of the standard library.  The
// linker could otherwise merge a function across files and keep instructions of the wrong set.
#pragma once

#include "collectives/reduce_formats.hpp"
#include "collectives/reduce_table.hpp"

namespace r2ccl::R2CCL_ISA {
namespace {

// A format with four accumulators, enough to hide the latency of an addition.
template <typename Format>
struct FourOf {
  using One = typename Format::Acc;
  struct Acc {
    One a, b, c, d;
  };
  static constexpr std::size_t step_bytes = Format::vector_bytes;
  static constexpr std::size_t vector_bytes = 4 * step_bytes;
  static constexpr std::size_t element_bytes = Format::element_bytes;
  static constexpr bool rounds = Format::rounds;

  R2CCL_INLINE Acc load(const std::byte* from) {
    return {Format::load(from), Format::load(from + step_bytes),
            Format::load(from + 2 * step_bytes), Format::load(from + 3 * step_bytes)};
  }
  R2CCL_INLINE void store(std::byte* to, const Acc& value) {
    Format::store(to, value.a);
    Format::store(to + step_bytes, value.b);
    Format::store(to + 2 * step_bytes, value.c);
    Format::store(to + 3 * step_bytes, value.d);
  }
  R2CCL_INLINE Acc round(const Acc& v) {
    return {Format::round(v.a), Format::round(v.b), Format::round(v.c), Format::round(v.d)};
  }
  R2CCL_INLINE Acc divide(const Acc& v, std::size_t ranks) {
    return {Format::divide(v.a, ranks), Format::divide(v.b, ranks), Format::divide(v.c, ranks),
            Format::divide(v.d, ranks)};
  }
  template <typename Op>
  R2CCL_INLINE Acc apply(const Acc& x, const Acc& y) {
    return {Format::template apply<Op>(x.a, y.a), Format::template apply<Op>(x.b, y.b),
            Format::template apply<Op>(x.c, y.c), Format::template apply<Op>(x.d, y.d)};
  }
};

// Access to the last elements through a buffer: the same arithmetic without reads past the end.
template <typename Format>
struct Tail {
  using Acc = typename Format::Acc;
  std::size_t bytes;

  [[gnu::always_inline]] Acc load(const std::byte* from) const {
    std::byte buffer[Format::vector_bytes] = {};
    __builtin_memcpy(buffer, from, bytes);
    return Format::load(buffer);
  }
  [[gnu::always_inline]] void store(std::byte* to, const Acc& value) const {
    std::byte buffer[Format::vector_bytes];
    Format::store(buffer, value);
    __builtin_memcpy(to, buffer, bytes);
  }
};

template <typename Format>
struct Whole {
  using Acc = typename Format::Acc;
  [[gnu::always_inline]] Acc load(const std::byte* from) const { return Format::load(from); }
  [[gnu::always_inline]] void store(std::byte* to, const Acc& value) const {
    Format::store(to, value);
  }
};

template <typename Format, typename Op, bool average>
struct Reduction {
  using Acc = typename Format::Acc;

  template <typename Access>
  R2CCL_INLINE void finish(const Fold& fold, std::size_t at, const Access& access,
                           const Acc& value) {
    if constexpr (average) {
      access.store(fold.out + at, Format::divide(value, fold.ranks));
    } else {
      access.store(fold.out + at, value);
    }
  }

  // Two inputs without intermediate rounding: the fast path, at memory bandwidth.
  struct Pair {
    template <typename Access>
    R2CCL_INLINE void step(const Fold& fold, std::size_t at, const Access& access) {
      const Acc first = access.load(fold.inputs[0] + at);
      finish(fold, at, access, Format::template apply<Op>(first, access.load(fold.inputs[1] + at)));
    }
  };

  struct Tree {
    template <typename Access>
    R2CCL_INLINE Acc node(const std::byte* const* inputs, std::size_t ranks, std::size_t at,
                          const Access& access) {
      Acc partial = access.load(inputs[0] + at);
      for (std::size_t rank = 1; rank < ranks; ++rank) {
        partial = Format::template apply<Op>(partial, access.load(inputs[rank] + at));
      }
      if constexpr (Format::rounds) {
        if (ranks > 1) partial = Format::round(partial);
      }
      return partial;
    }
    template <typename Access>
    R2CCL_INLINE void step(const Fold& fold, std::size_t at, const Access& access) {
      const std::byte* const* inputs = fold.inputs;
      Acc total = node(inputs, fold.node_sizes[0], at, access);
      for (std::size_t i = 1; i < fold.nodes; ++i) {
        inputs += fold.node_sizes[i - 1];
        total = Format::template apply<Op>(total, node(inputs, fold.node_sizes[i], at, access));
      }
      finish(fold, at, access, total);
    }
  };
};

template <typename Shape, typename Format>
R2CCL_INLINE std::size_t run_whole(const Fold& fold, std::size_t at, std::size_t bytes) {
  // A local copy: byte stores may alias any object and would force the compiler to reload `fold`.
  const Fold local = fold;
  for (; bytes - at >= Format::vector_bytes; at += Format::vector_bytes) {
    Shape::step(local, at, Whole<Format>{});
  }
  return at;
}

template <typename Format, typename Op, bool average, bool paired>
void run(const Fold& fold) {
  using Wide = Reduction<FourOf<Format>, Op, average>;
  using Narrow = Reduction<Format, Op, average>;
  using WideShape = std::conditional_t<paired, typename Wide::Pair, typename Wide::Tree>;
  using NarrowShape = std::conditional_t<paired, typename Narrow::Pair, typename Narrow::Tree>;

  const std::size_t bytes = fold.count * Format::element_bytes;
  std::size_t at = run_whole<WideShape, FourOf<Format>>(fold, 0, bytes);
  at = run_whole<NarrowShape, Format>(fold, at, bytes);
  if (at < bytes) NarrowShape::step(fold, at, Tail<Format>{bytes - at});
}

template <typename Format, typename Op, bool average = false>
void kernel(const Fold& fold) {
  // A single node of two ranks rounds after the node and at the end.  The first rounding changes
  // the result only before the division of avg; rounding twice in a row changes nothing.
  const bool rounds_between = Format::rounds && average && fold.nodes == 1;
  if (fold.ranks == 2 && !rounds_between) {
    run<Format, Op, average, true>(fold);
  } else {
    run<Format, Op, average, false>(fold);
  }
}

template <typename Arithmetic, typename Minimum, typename Maximum>
constexpr void fill(Kernel (&row)[5]) {
  row[0] = kernel<Arithmetic, Add>;
  row[1] = kernel<Arithmetic, Multiply>;
  row[2] = kernel<Minimum, Min>;
  row[3] = kernel<Maximum, Max>;
  row[4] = kernel<Arithmetic, Add, true>;
}

template <typename Format, typename Bits, Bits infinity, Bits quiet_nan>
constexpr void fill_float(Kernel (&row)[5]) {
  fill<Format, OrderedFormat<Bits, infinity, quiet_nan, Min>,
       OrderedFormat<Bits, infinity, quiet_nan, Max>>(row);
}

template <typename T>
constexpr void fill_integer(Kernel (&row)[5]) {
  fill<WrappingFormat<T>, PlainFormat<T>, PlainFormat<T>>(row);
}

constexpr KernelTable make_table() {
  KernelTable table{};
  auto& rows = table.kernels;
  fill_float<F16Format, std::int16_t, 0x7c00, 0x7e00>(rows[0]);
  fill_float<Bf16Format, std::int16_t, 0x7f80, 0x7fc0>(rows[1]);
  fill_float<FloatFormat<float>, std::int32_t, 0x7f800000, 0x7fc00000>(rows[2]);
  fill_float<FloatFormat<double>, std::int64_t, 0x7ff0000000000000, 0x7ff8000000000000>(rows[3]);
  fill_integer<std::int8_t>(rows[4]);
  fill_integer<std::uint8_t>(rows[5]);
  fill_integer<std::int32_t>(rows[6]);
  fill_integer<std::int64_t>(rows[7]);
  rows[8][0] = rows[8][3] = kernel<BooleanFormat, Or>;
  rows[8][1] = rows[8][2] = kernel<BooleanFormat, And>;
  return table;
}

}  // namespace
}  // namespace r2ccl::R2CCL_ISA
