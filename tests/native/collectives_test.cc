// All collective algorithms over memory, against naive references.
#include "collectives/collectives.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <tuple>

#include "memory_channel.hpp"
#include "naive_reduce.hpp"

namespace r2ccl {
namespace {

using naive::Bytes;
using testing_world::MemoryChannel;
using testing_world::World;
using Counts = std::vector<std::size_t>;

constexpr std::byte junk{0xee};

std::size_t sum(const Counts& counts, std::size_t first) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < first; ++i) total += counts[i];
  return total;
}
std::size_t sum(const Counts& counts) { return sum(counts, counts.size()); }

Bytes slice(const Bytes& bytes, std::size_t begin, std::size_t size) {
  const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(begin);
  return {from, from + static_cast<std::ptrdiff_t>(size)};
}

void put(Bytes& into, std::size_t at, const Bytes& part) {
  std::ranges::copy(part, into.begin() + static_cast<std::ptrdiff_t>(at));
}

// World size and segment size. Small segments pipeline a few hundred elements.
class Collectives : public testing::TestWithParam<std::tuple<int, std::size_t>> {
 protected:
  const int size = std::get<0>(GetParam());
  const std::size_t ranks = static_cast<std::size_t>(size);
  World world{size, std::get<1>(GetParam())};
  std::mt19937_64 random{ranks};

  // Runs a single call. Out of place, the caller may reuse its input as soon as the call returns.
  void call(int rank, const std::function<Status(Channel&)>& body) {
    MemoryChannel channel(world, rank);
    const Status status = body(channel);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  std::vector<Bytes> inputs(DType dtype, std::size_t count) {
    std::vector<Bytes> all(ranks);
    for (Bytes& input : all) input = naive::random_elements(dtype, count, random);
    return all;
  }

  // Returns uneven counts: some are 0, and a single count is large.
  Counts uneven(std::size_t most) {
    Counts counts(ranks);
    for (std::size_t& count : counts) count = random() % 3 == 0 ? 0 : random() % most;
    counts[random() % ranks] = 3 * most;
    return counts;
  }

  // Returns trees for 1 rank per node, 2 ranks per node, ranks alternating between 2 nodes, and 1
  // node.
  std::vector<ReductionTree> trees() const {
    std::vector<ReductionTree> all;
    for (const int kind : {0, 1, 2, 3}) {
      std::vector<int> nodes(ranks);
      for (int rank = 0; rank < size; ++rank) {
        const int labels[] = {rank, rank / 2, rank % 2, 0};
        nodes[static_cast<std::size_t>(rank)] = labels[kind];
      }
      all.push_back(ReductionTree::from_nodes(nodes));
    }
    return all;
  }
};

INSTANTIATE_TEST_SUITE_P(Small, Collectives,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5, 8, 9, 16),
                                          testing::Values(64u, 256u)));
INSTANTIATE_TEST_SUITE_P(Large, Collectives,
                         testing::Combine(testing::Values(64), testing::Values(256u)));

struct Kind {
  DType dtype;
  ReduceOp op;
};
constexpr Kind kinds[] = {
    {DType::f32, ReduceOp::sum},     {DType::bf16, ReduceOp::sum}, {DType::f16, ReduceOp::avg},
    {DType::f64, ReduceOp::prod},    {DType::i8, ReduceOp::max},   {DType::u8, ReduceOp::avg},
    {DType::boolean, ReduceOp::sum}, {DType::i32, ReduceOp::min},  {DType::i64, ReduceOp::sum},
};

// Both algorithms, in place and out of place. All results equal the same reference.
TEST_P(Collectives, AllReduce) {
  for (const std::size_t count : {0u, 1u, 5u, 32u, 129u, 1003u}) {
    for (const ReductionTree& tree : trees()) {
      const Kind kind = kinds[random() % std::size(kinds)];
      const auto in = inputs(kind.dtype, count);
      const Bytes expected = naive::reduce(kind.dtype, kind.op, in, tree, count);
      const Reducer reducer{kind.dtype, kind.op, tree, best_simd()};
      world.run([&](int rank) {
        for (const auto algorithm : {all_reduce_one_shot, all_reduce_two_shot}) {
          Bytes own = in[static_cast<std::size_t>(rank)];
          Bytes out(own.size(), junk);
          call(rank, [&](Channel& channel) {
            return algorithm(channel, own.data(), out.data(), count, reducer);
          });
          EXPECT_EQ(out, expected) << name_of(kind.dtype) << ' ' << count;
          EXPECT_EQ(own, in[static_cast<std::size_t>(rank)]) << "the input was written";
          call(rank, [&](Channel& channel) {
            return algorithm(channel, own.data(), own.data(), count, reducer);
          });
          EXPECT_EQ(own, expected) << "in place " << name_of(kind.dtype) << ' ' << count;
          std::ranges::fill(own, junk);
        }
      });
    }
  }
}

// Losses of the ranks, each a node: a few, one whole, almost all.
std::vector<std::vector<std::uint8_t>> losses(std::size_t ranks, std::mt19937_64& random) {
  std::vector<std::vector<std::uint8_t>> all(4, std::vector<std::uint8_t>(ranks));
  all[0].back() = 2;
  all[1].front() = most_lost;
  all[2].assign(ranks, most_lost);
  all[2][random() % ranks] = 0;
  for (std::uint8_t& lost : all[3]) lost = static_cast<std::uint8_t>(random() % (most_lost + 1));
  return all;
}

// Uneven shares change no bit: small inputs, inputs of any number of blocks, empty shares.
TEST_P(Collectives, AllReduceWithUnevenShares) {
  const std::size_t smallest = ranks * std::max(world.segment_bytes() / 2, Shares::border);
  for (const auto& lost : losses(ranks, random)) {
    const auto weights = share_weights(lost);
    const Shares shares = weights.empty() ? Shares() : Shares(weights);
    for (const std::size_t bytes : {std::size_t{0}, smallest, 4 * smallest, 5 * smallest + 72,
                                    11 * smallest + 8, 40 * smallest + 1000}) {
      const Kind kind = kinds[random() % std::size(kinds)];
      const std::size_t count = bytes / size_of(kind.dtype);
      const ReductionTree tree = trees()[random() % 4];
      const auto in = inputs(kind.dtype, count);
      const Bytes expected = naive::reduce(kind.dtype, kind.op, in, tree, count);
      const Reducer reducer{kind.dtype, kind.op, tree, best_simd()};
      world.run([&](int rank) {
        Bytes own = in[static_cast<std::size_t>(rank)];
        Bytes out(own.size(), junk);
        call(rank, [&](Channel& channel) {
          return all_reduce_two_shot_uneven(channel, own.data(), out.data(), count, reducer,
                                            shares);
        });
        EXPECT_EQ(out, expected) << name_of(kind.dtype) << ' ' << count;
        EXPECT_EQ(own, in[static_cast<std::size_t>(rank)]) << "the input was written";
        call(rank, [&](Channel& channel) {
          return all_reduce_two_shot_uneven(channel, own.data(), own.data(), count, reducer,
                                            shares);
        });
        EXPECT_EQ(own, expected) << "in place " << name_of(kind.dtype) << ' ' << count;
        std::ranges::fill(own, junk);
      });
    }
  }
}

TEST_P(Collectives, AllGatherV) {
  constexpr DType element_type = DType::i32;
  for (const Counts& counts :
       {Counts(ranks, 0), Counts(ranks, 1), Counts(ranks, 100), uneven(50)}) {
    std::vector<Bytes> in(ranks);
    Bytes expected;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      in[rank] = naive::random_elements(element_type, counts[rank], random);
      expected.insert(expected.end(), in[rank].begin(), in[rank].end());
    }
    world.run([&](int rank) {
      const auto own = static_cast<std::size_t>(rank);
      Bytes shard = in[own];
      Bytes out(expected.size(), junk);
      call(rank, [&](Channel& channel) {
        return all_gatherv(channel, shard.data(), out.data(), counts, element_type);
      });
      EXPECT_EQ(out, expected);
      std::ranges::fill(shard, junk);

      std::ranges::fill(out, junk);
      const std::size_t begin = sum(counts, own) * size_of(element_type);
      put(out, begin, in[own]);
      call(rank, [&](Channel& channel) {
        return all_gatherv(channel, out.data() + begin, out.data(), counts, element_type);
      });
      EXPECT_EQ(out, expected) << "in place";
    });
  }
}

TEST_P(Collectives, ReduceScatterV) {
  for (const Counts& counts : {Counts(ranks, 0), Counts(ranks, 1), Counts(ranks, 77), uneven(60)}) {
    for (const ReductionTree& tree : trees()) {
      const Kind kind = kinds[random() % std::size(kinds)];
      const auto in = inputs(kind.dtype, sum(counts));
      const Bytes folded = naive::reduce(kind.dtype, kind.op, in, tree, sum(counts));
      const Reducer reducer{kind.dtype, kind.op, tree, best_simd()};
      world.run([&](int rank) {
        const auto own = static_cast<std::size_t>(rank);
        const std::size_t begin = sum(counts, own) * size_of(kind.dtype);
        const Bytes expected = slice(folded, begin, counts[own] * size_of(kind.dtype));
        Bytes data = in[own];
        Bytes out(expected.size(), junk);
        call(rank, [&](Channel& channel) {
          return reduce_scatterv(channel, data.data(), out.data(), counts, reducer);
        });
        EXPECT_EQ(out, expected);
        EXPECT_EQ(data, in[own]) << "the input was written";
        call(rank, [&](Channel& channel) {
          return reduce_scatterv(channel, data.data(), data.data() + begin, counts, reducer);
        });
        EXPECT_EQ(slice(data, begin, expected.size()), expected) << "in place";
        std::ranges::fill(data, junk);
      });
    }
  }
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  constexpr DType element_type = DType::f16;
  for (const std::size_t count : {0u, 1u, 32u, 1001u}) {
    const Bytes expected = naive::random_elements(element_type, count, random);
    world.run([&](int rank) {
      for (int root = 0; root < size; ++root) {
        Bytes data = expected;
        if (rank != root) std::ranges::fill(data, junk);
        call(rank, [&](Channel& channel) {
          return broadcast(channel, data.data(), count, element_type, root);
        });
        EXPECT_EQ(data, expected) << "root " << root;
        std::ranges::fill(data, junk);
      }
    });
  }
}

TEST_P(Collectives, GatherToEveryRoot) {
  constexpr DType element_type = DType::f64;
  for (const Counts& counts : {Counts(ranks, 0), Counts(ranks, 40), uneven(30)}) {
    std::vector<Bytes> in(ranks);
    Bytes expected;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      in[rank] = naive::random_elements(element_type, counts[rank], random);
      expected.insert(expected.end(), in[rank].begin(), in[rank].end());
    }
    world.run([&](int rank) {
      const auto own = static_cast<std::size_t>(rank);
      for (int root = 0; root < size; ++root) {
        Bytes shard = in[own];
        Bytes out(rank == root ? expected.size() : 0, junk);
        call(rank, [&](Channel& channel) {
          return gather(channel, shard.data(), out.data(), counts, element_type, root);
        });
        std::ranges::fill(shard, junk);
        if (rank != root) continue;
        EXPECT_EQ(out, expected) << "root " << root;
      }
      // In place on root 0, because its shard comes first.
      Bytes data = in[own];
      if (rank == 0) data.resize(expected.size(), junk);
      call(rank, [&](Channel& channel) {
        return gather(channel, data.data(), data.data(), counts, element_type, 0);
      });
      EXPECT_EQ(data, rank == 0 ? expected : in[own]) << "in place";
    });
  }
}

TEST_P(Collectives, AllToAllV) {
  constexpr DType element_type = DType::i32;
  constexpr std::size_t element_size = size_of(element_type);
  // counts[from][to] as a function of the pair: none, even, symmetric, arbitrary.
  const std::function<std::size_t(std::size_t, std::size_t)> shapes[] = {
      [](std::size_t, std::size_t) { return 0; },
      [](std::size_t, std::size_t) { return 33; },
      [](std::size_t from, std::size_t to) { return from * to % 7 * 11; },
      [](std::size_t from, std::size_t to) { return (from * 5 + to * 3) % 8 * 17; },
  };
  for (const auto& shape : shapes) {
    std::vector<Counts> in_counts(ranks, Counts(ranks)), out_counts(ranks, Counts(ranks));
    for (std::size_t from = 0; from < ranks; ++from) {
      for (std::size_t to = 0; to < ranks; ++to) {
        in_counts[from][to] = out_counts[to][from] = shape(from, to);
      }
    }
    std::vector<Bytes> in(ranks), expected(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      in[rank] = naive::random_elements(element_type, sum(in_counts[rank]), random);
    }
    for (std::size_t to = 0; to < ranks; ++to) {
      for (std::size_t from = 0; from < ranks; ++from) {
        const Bytes shard = slice(in[from], sum(in_counts[from], to) * element_size,
                                  in_counts[from][to] * element_size);
        expected[to].insert(expected[to].end(), shard.begin(), shard.end());
      }
    }
    world.run([&](int rank) {
      const auto own = static_cast<std::size_t>(rank);
      Bytes data = in[own];
      Bytes out(expected[own].size(), junk);
      call(rank, [&](Channel& channel) {
        return all_to_allv(channel, data.data(), in_counts[own], out.data(), out_counts[own],
                           element_type);
      });
      EXPECT_EQ(out, expected[own]);
      data.resize(std::max(data.size(), out.size()));
      call(rank, [&](Channel& channel) {
        return all_to_allv(channel, data.data(), in_counts[own], data.data(), out_counts[own],
                           element_type);
      });
      EXPECT_EQ(slice(data, 0, out.size()), expected[own]) << "in place";
    });
  }
}

TEST_P(Collectives, SendAndRecvRoundARing) {
  if (size == 1) return;  // there is no peer
  constexpr DType element_type = DType::bf16;
  for (const std::size_t count : {0u, 1u, 999u}) {
    const auto in = inputs(element_type, count);
    world.run([&](int rank) {
      const int above = (rank + 1) % size, below = (rank + size - 1) % size;
      Bytes data = in[static_cast<std::size_t>(rank)];
      Bytes out(data.size(), junk);
      const auto give = [&](Channel& channel) {
        return send(channel, data.data(), count, element_type, above);
      };
      const auto take = [&](Channel& channel) {
        return recv(channel, out.data(), count, element_type, below);
      };
      // Even ranks send first and odd ranks receive first, so that no cycle of blocked senders
      // forms.
      if (rank % 2 == 0) call(rank, give);
      call(rank, take);
      if (rank % 2 != 0) call(rank, give);
      EXPECT_EQ(out, in[static_cast<std::size_t>(below)]);
    });
  }
}

TEST_P(Collectives, BarrierWaitsForTheLastRank) {
  constexpr int rounds = 5;
  std::atomic<int> arrived = 0;
  world.run([&](int rank) {
    for (int round = 1; round <= rounds; ++round) {
      arrived.fetch_add(1);
      call(rank, [&](Channel& channel) { return barrier(channel); });
      EXPECT_GE(arrived.load(), round * size);
    }
  });
}

// Counts operations and fails operation `fail_at`. All received data is zeros.
class ScriptedChannel final : public Channel {
 public:
  explicit ScriptedChannel(int fail_at, int rank = 1, int size = 4)
      : fail_at_(fail_at), rank_(rank), size_(size) {}
  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::size_t segment_bytes() const override { return 64; }
  Status send(int, std::span<const std::byte> data) override {
    ++sends;
    empty_sends += data.empty() ? 1 : 0;
    return next();
  }
  Result<std::span<const std::byte>> receive(int, std::size_t bytes) override {
    ++receives;
    Status status = next();
    if (!status.ok()) return status;
    return std::span<const std::byte>(zeros_).first(bytes);
  }
  Status release(int) override { return next(); }
  Status settle(int, std::size_t) override { return next(); }
  Status finish() override { return next(); }

  int operations = 0, sends = 0, empty_sends = 0, receives = 0;

 private:
  Status next() {
    if (operations++ != fail_at_) return {};
    return {ErrorCode::peer_lost, "scripted"};
  }
  int fail_at_, rank_, size_;
  Bytes zeros_ = Bytes(64);
};

struct NamedCall {
  const char* name;
  std::function<Status(Channel&, std::byte*, std::byte*, std::size_t)> run;
};

const std::vector<NamedCall>& every_call() {
  static const ReductionTree tree = ReductionTree::from_nodes(std::array{0, 0, 1, 1});
  static const auto reducer = [] {
    return Reducer{DType::u8, ReduceOp::sum, tree, Simd::portable};
  };
  static const std::vector<NamedCall> calls = {
      {"one_shot", [](Channel& c, std::byte* in, std::byte* out,
                      std::size_t n) { return all_reduce_one_shot(c, in, out, n, reducer()); }},
      {"two_shot", [](Channel& c, std::byte* in, std::byte* out,
                      std::size_t n) { return all_reduce_two_shot(c, in, out, n, reducer()); }},
      {"two_shot with uneven shares",
       [](Channel& c, std::byte* in, std::byte* out, std::size_t n) {
         const Shares shares(std::array<std::uint32_t, 4>{0, 1, 2, 2});
         return all_reduce_two_shot_uneven(c, in, out, n, reducer(), shares);
       }},
      {"all_gatherv",
       [](Channel& c, std::byte* in, std::byte* out, std::size_t n) {
         return all_gatherv(c, in, out, Counts(4, n / 4), DType::u8);
       }},
      {"reduce_scatterv",
       [](Channel& c, std::byte* in, std::byte* out, std::size_t n) {
         return reduce_scatterv(c, in, out, Counts(4, n / 4), reducer());
       }},
      {"broadcast", [](Channel& c, std::byte*, std::byte* out,
                       std::size_t n) { return broadcast(c, out, n, DType::u8, 0); }},
      {"broadcast from here", [](Channel& c, std::byte*, std::byte* out,
                                 std::size_t n) { return broadcast(c, out, n, DType::u8, 1); }},
      {"gather", [](Channel& c, std::byte* in, std::byte* out,
                    std::size_t n) { return gather(c, in, out, Counts(4, n / 4), DType::u8, 0); }},
      {"gather to here",
       [](Channel& c, std::byte* in, std::byte* out, std::size_t n) {
         return gather(c, in, out, Counts(4, n / 4), DType::u8, 1);
       }},
      {"all_to_allv",
       [](Channel& c, std::byte* in, std::byte* out, std::size_t n) {
         return all_to_allv(c, in, Counts(4, n / 4), out, Counts(4, n / 4), DType::u8);
       }},
      {"send", [](Channel& c, std::byte* in, std::byte*,
                  std::size_t n) { return send(c, in, n, DType::u8, 0); }},
      {"recv", [](Channel& c, std::byte*, std::byte* out,
                  std::size_t n) { return recv(c, out, n, DType::u8, 0); }},
      {"barrier", [](Channel& c, std::byte*, std::byte*, std::size_t) { return barrier(c); }},
  };
  return calls;
}

// A failed operation ends the call with the operation's error; the call leaves the channel alone.
TEST(CollectiveErrors, EndTheCallAtOnce) {
  for (const NamedCall& call : every_call()) {
    for (const bool in_place : {false, true}) {
      constexpr std::size_t bytes = 1200;  // enough for uneven shares
      Bytes in(bytes), out(bytes);
      std::byte* const to = in_place ? in.data() : out.data();
      ScriptedChannel undisturbed(-1);
      ASSERT_TRUE(call.run(undisturbed, in.data(), to, bytes).ok()) << call.name;
      ASSERT_GT(undisturbed.operations, 1);
      for (int fail_at = 0; fail_at < undisturbed.operations; ++fail_at) {
        ScriptedChannel channel(fail_at);
        const Status status = call.run(channel, in.data(), to, bytes);
        EXPECT_EQ(status.code(), ErrorCode::peer_lost) << call.name << ' ' << fail_at;
        EXPECT_EQ(channel.operations, fail_at + 1) << call.name << " went on";
      }
    }
  }
}

// Empty calls exchange as many messages as calls of a single segment.
TEST(CollectiveMessages, EmptyCallsStillExchangeMessages) {
  for (const NamedCall& call : every_call()) {
    Bytes in(64), out(64);
    ScriptedChannel full(-1), empty(-1);
    ASSERT_TRUE(call.run(full, in.data(), out.data(), 64).ok());
    ASSERT_TRUE(call.run(empty, in.data(), out.data(), 0).ok());
    EXPECT_EQ(empty.sends, full.sends) << call.name;
    EXPECT_EQ(empty.receives, full.receives) << call.name;
    EXPECT_EQ(empty.empty_sends, empty.sends) << call.name;
    EXPECT_GT(empty.sends + empty.receives, 0) << call.name;
  }
}

}  // namespace
}  // namespace r2ccl
