// reduce(): all instruction sets against the naive reference, bit for bit.
#include "collectives/reduce.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <numeric>

#include "naive_reduce.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace r2ccl {
namespace {

using naive::Bytes;

std::vector<Simd> simds() {
  std::vector<Simd> all;
  for (const Simd simd : {Simd::portable, Simd::avx2, Simd::avx512}) {
    if (simd <= best_simd()) all.push_back(simd);
  }
  return all;
}

std::vector<const void*> pointers(const std::vector<Bytes>& inputs) {
  std::vector<const void*> result;
  for (const Bytes& input : inputs) result.push_back(input.data());
  return result;
}

std::vector<Bytes> random_inputs(DType dtype, std::size_t ranks, std::size_t count,
                                 std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Bytes> inputs(ranks);
  for (Bytes& input : inputs) input = naive::random_elements(dtype, count, random);
  return inputs;
}

// Node label of each rank.
const std::vector<std::vector<int>> layouts = {
    {0},
    {0, 0},
    {0, 1},
    {0, 0, 0},
    {0, 1, 2},
    {0, 0, 1, 1},
    {0, 1, 0, 1},
    {0, 0, 0, 1},
    {7, 3, 3, 3},
    {0, 1, 1, 0, 2},
    {0, 0, 0, 0},
    {4, 3, 2, 1, 0},
    {0, 0, 0, 0, 1, 1, 1, 1},
};

template <typename T>
Bytes bytes_of(std::initializer_list<T> values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), std::data(values), bytes.size());
  return bytes;
}

class EveryKind : public testing::TestWithParam<std::pair<DType, ReduceOp>> {
 protected:
  const DType dtype = GetParam().first;
  const ReduceOp op = GetParam().second;
};

INSTANTIATE_TEST_SUITE_P(Reduce, EveryKind, testing::ValuesIn(naive::every_kind()),
                         [](const auto& instance) {
                           return std::string(name_of(instance.param.first)) + "_" +
                                  std::string(name_of(instance.param.second));
                         });

// Counts 0..300 at shifting odd alignments; no byte outside the output changes.
TEST_P(EveryKind, MatchesTheReferenceAtEverySizeAndAlignment) {
  constexpr std::size_t most = 300;
  constexpr std::byte guard{0xa5};
  const std::size_t size = size_of(dtype);
  for (std::size_t layout = 0; layout < layouts.size(); ++layout) {
    const ReductionTree tree = ReductionTree::from_nodes(layouts[layout]);
    const std::size_t ranks = tree.order.size();
    const auto inputs = random_inputs(dtype, ranks, most, layout);
    const Bytes expected = naive::reduce(dtype, op, inputs, tree, most);
    for (std::size_t count = 0; count <= most; ++count) {
      std::vector<Bytes> shifted(ranks);
      std::vector<const void*> views(ranks);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const std::size_t shift = (count + 5 * rank) % 67;
        // Sized to the readable length, so that ASan detects a read beyond the end.
        shifted[rank].assign(shift, guard);
        shifted[rank].insert(shifted[rank].end(), inputs[rank].begin(),
                             inputs[rank].begin() + static_cast<std::ptrdiff_t>(count * size));
        views[rank] = shifted[rank].data() + shift;
      }
      const std::size_t shift = 1 + count % 63;
      for (const Simd simd : simds()) {
        Bytes out(shift + count * size + 64, guard);
        reduce(dtype, op, out.data() + shift, views, tree, count, simd);
        ASSERT_EQ(std::memcmp(out.data() + shift, expected.data(), count * size), 0)
            << name_of(simd) << " layout " << layout << " count " << count;
        for (std::size_t i = 0; i < out.size(); ++i) {
          if (i < shift || i >= shift + count * size) {
            ASSERT_EQ(out[i], guard) << name_of(simd) << " wrote outside at " << i;
          }
        }
      }
    }
  }
}

TEST_P(EveryKind, WorksInPlaceWithAnyInput) {
  for (const std::size_t count : {1u, 17u, 128u, 1000u}) {
    for (const auto& layout : layouts) {
      const ReductionTree tree = ReductionTree::from_nodes(layout);
      const auto inputs = random_inputs(dtype, layout.size(), count, count);
      const Bytes expected = naive::reduce(dtype, op, inputs, tree, count);
      for (const Simd simd : simds()) {
        for (std::size_t rank = 0; rank < layout.size(); ++rank) {
          auto copy = inputs;
          reduce(dtype, op, copy[rank].data(), pointers(copy), tree, count, simd);
          ASSERT_EQ(copy[rank], expected) << name_of(simd) << " out is input " << rank;
        }
      }
    }
  }
}

TEST_P(EveryKind, FoldsManyRanks) {
  for (const std::size_t ranks : {16u, 64u, 130u}) {
    std::vector<int> layout(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) layout[rank] = static_cast<int>(rank / 8);
    const ReductionTree tree = ReductionTree::from_nodes(layout);
    const auto inputs = random_inputs(dtype, ranks, 333, ranks);
    const Bytes expected = naive::reduce(dtype, op, inputs, tree, 333);
    for (const Simd simd : simds()) {
      Bytes out(expected.size());
      reduce(dtype, op, out.data(), pointers(inputs), tree, 333, simd);
      EXPECT_EQ(out, expected) << name_of(simd) << ' ' << ranks;
    }
  }
}

// All 65536 values, alone and with partners for every rounding case: ties, denormals, overflow and
// cancellation.
void check_every_16_bit_value(DType dtype) {
  constexpr std::size_t value_count = 65536;
  Bytes every(2 * value_count);
  for (std::size_t i = 0; i < value_count; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    std::memcpy(every.data() + 2 * i, &bits, 2);
  }
  const ReductionTree alone = ReductionTree::from_nodes(std::array{0});
  for (const Simd simd : simds()) {
    Bytes out(every.size());
    reduce(dtype, ReduceOp::sum, out.data(), std::array<const void*, 1>{every.data()}, alone,
           value_count, simd);
    for (std::size_t i = 0; i < value_count; ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, out.data() + 2 * i, 2);
      const std::size_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
      const std::size_t quiet = dtype == DType::f16 ? 0x7e00 : 0x7fc0;
      ASSERT_EQ(bits, (i & 0x7fff) > infinity ? quiet : i) << name_of(simd);
    }
  }
  const ReductionTree pair = ReductionTree::from_nodes(std::array{0, 1});
  std::mt19937_64 random(1);
  for (const ReduceOp op : naive::all_ops) {
    for (int round = 0; round < 4; ++round) {
      const std::vector<Bytes> inputs = {every, naive::random_elements(dtype, value_count, random)};
      const Bytes expected = naive::reduce(dtype, op, inputs, pair, value_count);
      for (const Simd simd : simds()) {
        Bytes out(every.size());
        reduce(dtype, op, out.data(), pointers(inputs), pair, value_count, simd);
        ASSERT_EQ(out, expected) << name_of(simd) << ' ' << name_of(op);
      }
    }
  }
}

TEST(Reduce, ConvertsEveryF16) { check_every_16_bit_value(DType::f16); }
TEST(Reduce, ConvertsEveryBf16) { check_every_16_bit_value(DType::bf16); }

// Known answers detect an error made in both the kernels and the reference.
TEST(Reduce, GivesKnownAnswers) {
  const auto fold = [](DType dtype, ReduceOp op, std::vector<int> layout,
                       const std::vector<Bytes>& inputs) {
    const std::size_t count = inputs[0].size() / size_of(dtype);
    Bytes first;
    for (const Simd simd : simds()) {
      Bytes out(inputs[0].size());
      reduce(dtype, op, out.data(), pointers(inputs), ReductionTree::from_nodes(layout), count,
             simd);
      if (first.empty()) first = out;
      EXPECT_EQ(out, first);
    }
    return first;
  };
  using U16 = std::uint16_t;
  using U32 = std::uint32_t;
  // bf16 256 + 1 + 1 is 258 in fp32, and bf16 holds 258. With rounding after each step: 256.
  const U16 b256 = 0x4380, b258 = 0x4381, b1 = 0x3f80;
  EXPECT_EQ(fold(DType::bf16, ReduceOp::sum, {0, 1, 2},
                 {bytes_of<U16>({b256}), bytes_of<U16>({b1}), bytes_of<U16>({b1})}),
            bytes_of<U16>({b258}));
  // With 256 and 1 on the same node, 257 is rounded to 256 (even) at the node boundary.
  EXPECT_EQ(fold(DType::bf16, ReduceOp::sum, {0, 0, 1},
                 {bytes_of<U16>({b256}), bytes_of<U16>({b1}), bytes_of<U16>({b1})}),
            bytes_of<U16>({b256}));
  // f16: 65504 + 16 is a tie and rounds to infinity; 65504 + 15.99 stays 65504. Half of the
  // smallest denormal rounds to zero.
  EXPECT_EQ(
      fold(DType::f16, ReduceOp::sum, {0, 1},
           {bytes_of<U16>({0x7bff, 0x7bff, 0x0001}), bytes_of<U16>({0x4c00, 0x4bff, 0x0001})}),
      bytes_of<U16>({0x7c00, 0x7bff, 0x0002}));
  EXPECT_EQ(fold(DType::f16, ReduceOp::avg, {0, 1},
                 {bytes_of<U16>({0x0001, 0x0003}), bytes_of<U16>({0x0000, 0x0000})}),
            bytes_of<U16>({0x0000, 0x0002}));
  // inf - inf is the positive quiet NaN. A signalling NaN becomes quiet. Denormals survive.
  EXPECT_EQ(fold(DType::f32, ReduceOp::sum, {0, 1},
                 {bytes_of<U32>({0x7f800000, 0xffa00001, 0x00000001}),
                  bytes_of<U32>({0xff800000, 0x3f800000, 0x00000001})}),
            bytes_of<U32>({0x7fc00000, 0x7fc00000, 0x00000002}));
  // -0 < +0 in either order. NaN takes precedence over all values.
  EXPECT_EQ(fold(DType::f32, ReduceOp::min, {0, 1},
                 {bytes_of<U32>({0x00000000, 0x80000000, 0xffc00000, 0xff800000}),
                  bytes_of<U32>({0x80000000, 0x00000000, 0xff800000, 0x7fffffff})}),
            bytes_of<U32>({0x80000000, 0x80000000, 0x7fc00000, 0x7fc00000}));
  EXPECT_EQ(fold(DType::f32, ReduceOp::max, {0, 1},
                 {bytes_of<U32>({0x00000000, 0x80000000, 0xffc00000, 0xff800000}),
                  bytes_of<U32>({0x80000000, 0x00000000, 0x7f800000, 0x7fffffff})}),
            bytes_of<U32>({0x00000000, 0x00000000, 0x7fc00000, 0x7fc00000}));
  // Integers wrap first and divide afterwards, towards zero: 100 + 100 is -56 in int8.
  using I8 = std::int8_t;
  EXPECT_EQ(fold(DType::i8, ReduceOp::avg, {0, 1},
                 {bytes_of<I8>({100, -3, 3}), bytes_of<I8>({100, 0, 0})}),
            bytes_of<I8>({-28, -1, 1}));
  EXPECT_EQ(fold(DType::u8, ReduceOp::prod, {0, 1},
                 {bytes_of<std::uint8_t>({200}), bytes_of<std::uint8_t>({2})}),
            bytes_of<std::uint8_t>({144}));
  using I64 = std::int64_t;
  constexpr I64 most = std::numeric_limits<I64>::max();
  constexpr I64 least = std::numeric_limits<I64>::min();
  EXPECT_EQ(fold(DType::i64, ReduceOp::sum, {0, 1},
                 {bytes_of<I64>({most, least}), bytes_of<I64>({1, -1})}),
            bytes_of<I64>({least, most}));
  EXPECT_EQ(fold(DType::boolean, ReduceOp::sum, {0, 1},
                 {bytes_of<std::uint8_t>({0, 0, 2, 255}), bytes_of<std::uint8_t>({0, 128, 0, 1})}),
            bytes_of<std::uint8_t>({0, 1, 1, 1}));
  EXPECT_EQ(fold(DType::boolean, ReduceOp::min, {0, 1},
                 {bytes_of<std::uint8_t>({0, 0, 2, 255}), bytes_of<std::uint8_t>({0, 128, 1, 2})}),
            bytes_of<std::uint8_t>({0, 0, 1, 1}));
}

TEST(ReductionTree, KeepsRankOrderInNodesAndNodesByLowestRank) {
  const ReductionTree tree = ReductionTree::from_nodes(std::array{9, 2, 9, 2, 5});
  EXPECT_EQ(tree.order, (std::vector<std::uint16_t>{0, 2, 1, 3, 4}));
  EXPECT_EQ(tree.node_sizes, (std::vector<std::uint16_t>{2, 2, 1}));
  EXPECT_TRUE(ReductionTree::from_nodes({}).order.empty());
}

#if defined(__x86_64__)
// A host program may flush denormals, change the rounding mode or enable traps. reduce() restores
// the caller's MXCSR, flags included, and the caller's setting does not change the result.
TEST(Reduce, CallersMxcsrDoesNotMatterAndStaysUnchanged) {
  struct Restore {
    unsigned int saved = _mm_getcsr();
    ~Restore() { _mm_setcsr(saved); }
  } restore;
  constexpr unsigned int controls[] = {
      0x1f80,                             // default
      0x1f80 | _MM_FLUSH_ZERO_ON | 0x40,  // FTZ and DAZ
      0x1f80 | _MM_ROUND_UP,
      0x1f80 | _MM_ROUND_TOWARD_ZERO | 0x3f,  // with all exception flags set
      0x0000,                                 // all exceptions trap
  };
  const ReductionTree tree = ReductionTree::from_nodes(std::array{0, 0, 1});
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    for (const ReduceOp op : naive::all_ops) {
      const auto inputs = random_inputs(dtype, 3, 500, 11);
      const auto views = pointers(inputs);
      const Bytes expected = naive::reduce(dtype, op, inputs, tree, 500);
      for (const Simd simd : simds()) {
        for (const unsigned int control : controls) {
          Bytes out(expected.size());
          _mm_setcsr(control);
          reduce(dtype, op, out.data(), views, tree, 500, simd);
          const unsigned int after = _mm_getcsr();
          _mm_setcsr(restore.saved);
          EXPECT_EQ(after, control);
          EXPECT_EQ(out, expected) << name_of(simd) << ' ' << name_of(op) << " MXCSR " << control;
        }
      }
    }
  }
}
#endif

TEST(Reduce, NamesItsVariants) {
  EXPECT_EQ(name_of(Simd::portable), "portable");
  EXPECT_EQ(name_of(Simd::avx2), "avx2");
  EXPECT_EQ(name_of(Simd::avx512), "avx512");
}

TEST(Types, DescribesCalls) {
  EXPECT_EQ(describe({.count = 1024,
                      .number = 17,
                      .collective = Collective::all_reduce,
                      .dtype = DType::f32,
                      .op = ReduceOp::sum}),
            "call 17: all_reduce(sum, float32, 1024 elements)");
  EXPECT_EQ(describe({.count = 3,
                      .number = 2,
                      .root = 1,
                      .collective = Collective::broadcast,
                      .dtype = DType::bf16}),
            "call 2: broadcast(bfloat16, 3 elements, root 1)");
  EXPECT_EQ(describe({.number = 5, .collective = Collective::barrier}), "call 5: barrier()");
  EXPECT_EQ(describe({.number = 9, .step = 4, .call = 2, .collective = Collective::barrier}),
            "call 9 (step 4, call 3): barrier()");
  EXPECT_EQ(describe({.count = 3, .number = 4, .step = 2, .collective = Collective::send}),
            "call 4 (step 2): send or recv(uint8, 3 elements)");
  EXPECT_EQ(name_of(DType::boolean), "bool");
  EXPECT_EQ(name_of(Algorithm::automatic), "auto");
}

}  // namespace
}  // namespace r2ccl
