// Exchange inside a node, with host threads in place of GPUs: the bits of the sum, and the protocol
// between local peers and with their hosts.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "collectives/reduce.hpp"
#include "device/exchange_bodies.hpp"
#include "device/proxy.hpp"
#include "host_device.hpp"

namespace r2ccl {
namespace {

using device::EvenShards;
using device::Exchange;
using device::Proxy;
using device::Sequence;
using device::ThreadPosition;
using testing::HostDevice;
using testing::ThreadBlock;
using Bytes = std::vector<std::byte>;

constexpr std::array dtypes{DType::f16, DType::bf16, DType::f32, DType::f64,    DType::i8,
                            DType::u8,  DType::i32,  DType::i64, DType::boolean};
constexpr std::array ops{ReduceOp::sum, ReduceOp::prod, ReduceOp::min, ReduceOp::max};
constexpr std::byte untouched{0xA5};

// Returns random bits: infinities, denormals and all NaNs are possible.
Bytes any_bits(std::size_t bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes made(bytes);
  for (std::byte& byte : made) byte = static_cast<std::byte>(random());
  return made;
}

Bytes reduced(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs,
              const std::vector<int>& nodes) {
  Bytes out(inputs[0].size());
  std::vector<const void*> from;
  from.reserve(inputs.size());
  for (const Bytes& input : inputs) from.push_back(input.data());
  reduce(dtype, op, out.data(), from, ReductionTree::from_nodes(nodes),
         out.size() / size_of(dtype));
  return out;
}

// Memory on a Vector boundary, like GPU memory.
struct Aligned {
  explicit Aligned(std::size_t bytes) : lines((bytes + 127) / 128) {}
  std::byte* data() { return reinterpret_cast<std::byte*>(lines.data()); }
  struct alignas(128) Line {
    std::byte bytes[128];
  };
  std::vector<Line> lines;
};

TEST(Fold, MatchesANodeOfTheCanonicalTree) {
  for (const DType dtype : dtypes)
    for (const ReduceOp op : ops)
      for (const std::uint32_t ranks : {1U, 2U, 3U, 5U})
        for (const std::size_t count : {1UL, 7UL, 64UL, 1000UL}) {
          const std::size_t bytes = count * size_of(dtype);
          const std::size_t shift = count == 64 ? size_of(dtype) : 0;  // not on a Vector boundary
          std::vector<Bytes> inputs;
          std::vector<Aligned> memory;
          device::Operands operands{};
          operands.ranks = ranks;
          for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            inputs.push_back(any_bits(bytes, count * 31 + rank));
            memory.emplace_back(bytes + shift);
            std::memcpy(memory.back().data() + shift, inputs.back().data(), bytes);
          }
          for (std::uint32_t rank = 0; rank < ranks; ++rank)
            operands.of[rank] = memory[rank].data() + shift;
          Aligned out(bytes + shift);
          for (std::uint32_t thread = 0; thread < 3; ++thread)
            device::fold({0, 1, thread, 3}, out.data() + shift, operands, bytes, dtype, op);
          const Bytes wanted = reduced(dtype, op, inputs, std::vector<int>(ranks, 0));
          EXPECT_EQ(std::memcmp(out.data() + shift, wanted.data(), bytes), 0)
              << name_of(dtype) << ' ' << name_of(op) << ' ' << ranks << " ranks, " << count;
        }
}

TEST(EvenShards, CoverAllElements) {
  for (const std::size_t element : {1UL, 2UL, 4UL, 8UL})
    for (const std::uint32_t ranks : {1U, 2U, 3U, 16U})
      for (const std::size_t count : {0UL, 1UL, 63UL, 64UL, 65UL, 1000UL, 100'000UL}) {
        const EvenShards shards = EvenShards::of(count, element, ranks);
        std::uint64_t next = 0;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(shards.first(rank), next);
          EXPECT_TRUE(shards.size(rank) == 0 || shards.first(rank) * element % 128 == 0);
          next += shards.size(rank);
        }
        EXPECT_EQ(next, count);
      }
}

// ---- ranks of a node ----

constexpr std::size_t most_bytes = 8192;
constexpr std::uint32_t ranks = 3;

constexpr std::uint32_t all_ranks = 2 * ranks;

enum class Kind : std::uint8_t { all_reduce, all_gather, reduce_scatter };

struct Call {
  Kind kind = Kind::all_reduce;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::size_t count = 0;  // per shard, if the collective has shards

  [[nodiscard]] std::size_t bytes() const { return count * size_of(dtype); }
  [[nodiscard]] std::size_t input_bytes() const {
    return bytes() * (kind == Kind::reduce_scatter ? all_ranks : 1);
  }
  [[nodiscard]] std::size_t output_bytes() const {
    return bytes() * (kind == Kind::all_gather ? all_ranks : 1);
  }
  [[nodiscard]] EvenShards shards() const { return EvenShards::of(count, size_of(dtype), ranks); }
  // Rows of a local rank: its shard of an all-reduce; otherwise the shards of all ranks with this
  // local rank.
  [[nodiscard]] device::Rows rows_of(std::uint32_t local_rank) const {
    if (kind != Kind::all_reduce) return {2, bytes(), ranks * bytes(), 0, local_rank * bytes()};
    const EvenShards even = shards();
    return {1, even.size(local_rank) * even.element, 0, 0, even.first(local_rank) * even.element};
  }
};

Call call_of(std::uint32_t number) {
  std::minstd_rand random(number + 1);
  const auto kind = static_cast<Kind>(random() % 3);
  const DType dtype = dtypes[random() % dtypes.size()];
  const std::size_t most = most_bytes / (kind == Kind::all_reduce ? 1 : all_ranks);
  return {kind, dtype, ops[random() % ops.size()], random() % (most / size_of(dtype) + 1)};
}

// Input of rank `rank` on node `node`.
Bytes input_of(std::uint32_t number, std::uint32_t node, std::uint32_t rank) {
  return any_bits(call_of(number).input_bytes(), number * 1000 + node * 100 + rank);
}
std::vector<Bytes> inputs_of(std::uint32_t number, std::uint32_t node) {
  std::vector<Bytes> inputs;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) inputs.push_back(input_of(number, node, rank));
  return inputs;
}
Bytes bytes_of(const Bytes& all, std::size_t first, std::size_t bytes) {
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
  return {begin, begin + static_cast<std::ptrdiff_t>(bytes)};
}

// A rank of node 0. The proxy's callback replaces the rails: it computes the contribution of the
// same local rank on node 1.
struct Rank {
  Rank() { device.blocks = device.threads = 2; }

  void open(std::vector<std::unique_ptr<Rank>>& node, std::uint32_t own) {
    exchange.mailbox = &device.mailbox;
    exchange.state = &device.state;
    exchange.staging = device.staging;
    exchange.node.ranks = ranks;
    exchange.node.own = own;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      exchange.node.inboxes[rank] = &node[rank]->inbox;
      exchange.node.memory[rank] = node[rank]->memory.data();
    }
    exchange.node.entry_bytes = 2 * most_bytes;
    exchange.node.result_offset = most_bytes;
    proxy = std::make_unique<Proxy>(
        device.mailbox,
        [this, own](std::uint32_t plan, Sequence sequence) { return carry(plan, sequence, own); },
        Proxy::Flush(), device::ProxyOptions{});
    EXPECT_TRUE(proxy->start().ok());
  }

  Status carry(std::uint32_t number, Sequence sequence, std::uint32_t own) {
    if (number == fails_at) return {ErrorCode::peer_lost, "the other node is gone"};
    const Call call = call_of(number);
    const device::Rows rows = call.rows_of(own);
    const std::byte* const in = call.kind == Kind::all_gather ? device.staging.result(sequence)
                                                              : device.staging.input(sequence);
    Bytes result(in, in + (call.kind == Kind::all_gather ? call.bytes() : rows.bytes));
    if (call.kind == Kind::all_gather) {
      std::ranges::copy(input_of(number, 1, own), std::back_inserter(result));
    } else {
      const Bytes theirs = reduced(call.dtype, call.op, inputs_of(number, 1), {1, 1, 1});
      result =
          reduced(call.dtype, call.op, {result, bytes_of(theirs, rows.first, rows.bytes)}, {0, 1});
    }
    std::ranges::copy(result, device.staging.result(sequence));
    return {};
  }

  // Launches the kernels of a call in stream order.
  void post(std::uint32_t number, std::uint32_t own) {
    const Call call = call_of(number);
    Bytes input = input_of(number, 0, own);
    if (call.kind == Kind::all_gather)
      return device.launch([&](const ThreadPosition& at, const ThreadBlock& block,
                               device::Shared& shared) {
        device::stage_in_place(at, block, shared, exchange, input.data(), input.size(), 0, number);
      });
    device.launch([&](const ThreadPosition& at, const ThreadBlock& block, device::Shared& shared) {
      device::publish_input(at, block, shared, exchange, input.data(), {1, input.size()}, true);
    });
    std::ranges::fill(input, untouched);  // the caller may reuse the input
    device.launch([&](const ThreadPosition& at, const ThreadBlock& block, device::Shared& shared) {
      device::local_reduce_scatter(at, block, shared, exchange, call.rows_of(own), call.dtype,
                                   call.op, number, true);
    });
  }
  Bytes receive(std::uint32_t number, std::uint32_t lag) {
    const Call call = call_of(number);
    Bytes target(call.output_bytes(), untouched);
    if (call.kind == Kind::reduce_scatter) {
      device.launch(
          [&](const ThreadPosition& at, const ThreadBlock& block, device::Shared& shared) {
            device::deliver_shard(at, block, shared, exchange, target.data(), target.size(),
                                  device::Reduction(), lag);
          });
      return target;
    }
    device::OutputRows outputs{};
    for (std::uint32_t rank = 0; rank < ranks; ++rank) outputs.of[rank] = call.rows_of(rank);
    const device::Rows& own = outputs.of[exchange.node.own];
    device.launch([&](const ThreadPosition& at, const ThreadBlock& block, device::Shared& shared) {
      device::publish_result(at, block, shared, exchange, own.count * own.bytes,
                             device::Reduction(), lag);
    });
    device.launch([&](const ThreadPosition& at, const ThreadBlock& block, device::Shared& shared) {
      device::local_all_gather(at, block, shared, exchange, outputs, target.data(), lag, true);
    });
    return target;
  }

  HostDevice device{most_bytes, most_bytes};
  device::Inbox inbox;
  Aligned memory{device::ring * 2 * most_bytes};
  Exchange exchange{};
  std::uint32_t fails_at = ~0U;
  std::unique_ptr<Proxy> proxy;
};

// Expected result of rank `own` on node 0.
Bytes wanted(std::uint32_t number, std::uint32_t own) {
  const Call call = call_of(number);
  std::vector<Bytes> all = inputs_of(number, 0);
  for (Bytes& theirs : inputs_of(number, 1)) all.push_back(std::move(theirs));
  if (call.kind == Kind::all_gather) {
    Bytes joined;
    for (const Bytes& shard : all) std::ranges::copy(shard, std::back_inserter(joined));
    return joined;
  }
  const Bytes sum = reduced(call.dtype, call.op, all, {0, 0, 0, 1, 1, 1});
  return call.kind == Kind::all_reduce ? sum : bytes_of(sum, own * call.bytes(), call.bytes());
}

struct NodeRanks {
  NodeRanks() {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) members.push_back(std::make_unique<Rank>());
    for (std::uint32_t rank = 0; rank < ranks; ++rank) members[rank]->open(members, rank);
  }
  void run(const std::function<void(Rank&, std::uint32_t)>& body) {
    std::vector<std::thread> streams;
    for (std::uint32_t rank = 0; rank < ranks; ++rank)
      streams.emplace_back([&body, &member = *members[rank], rank] { body(member, rank); });
    for (std::thread& stream : streams) stream.join();
  }
  std::vector<std::unique_ptr<Rank>> members;
};

TEST(Exchange, GivesTheBitsOfTheFlatCollectives) {
  NodeRanks node;
  node.run([](Rank& rank, std::uint32_t own) {
    for (std::uint32_t number = 0; number < 60; ++number) {
      rank.post(number, own);
      EXPECT_EQ(rank.receive(number, 0), wanted(number, own)) << number;
    }
  });
  // A host reads these words to detect that its kernels wait for the node.
  for (const auto& member : node.members) {
    EXPECT_EQ(load_acquire(member->device.mailbox.entered), 60U);
    EXPECT_EQ(load_acquire(member->device.mailbox.left), 60U);
    for (const auto* words : {&member->inbox.input_ready, &member->inbox.inputs_read,
                              &member->inbox.result_ready, &member->inbox.results_read})
      for (std::uint32_t rank = 0; rank < ranks; ++rank) EXPECT_EQ((*words)[rank].value, 60U);
  }
}

TEST(Exchange, ASliceIsReducedWhileThePreviousSliceIsOnTheRails) {
  NodeRanks node;
  node.run([](Rank& rank, std::uint32_t own) {
    for (std::uint32_t number = 0; number < 40; number += 2) {
      rank.post(number, own);
      rank.post(number + 1, own);
      EXPECT_EQ(rank.receive(number, 1), wanted(number, own)) << number;
      EXPECT_EQ(rank.receive(number + 1, 0), wanted(number + 1, own)) << number + 1;
    }
  });
}

TEST(Exchange, ExchangeNumbersWrapIndependently) {
  NodeRanks node;
  for (const auto& member : node.members) {
    member->device.state.exchange = 0xFFFFFFFA;
    for (auto* words : {&member->inbox.input_ready, &member->inbox.inputs_read,
                        &member->inbox.result_ready, &member->inbox.results_read})
      for (device::Word& word : *words) word.value = 0xFFFFFFFA;
  }
  node.run([](Rank& rank, std::uint32_t own) {
    for (std::uint32_t number = 0; number < 12; ++number) {
      rank.post(number, own);
      EXPECT_EQ(rank.receive(number, 0), wanted(number, own)) << number;
    }
  });
}

TEST(Exchange, ARankWithoutResultsEndsAllRanksOfTheNode) {
  NodeRanks node;
  constexpr std::uint32_t last = 5;
  node.members[1]->fails_at = last;
  node.run([](Rank& rank, std::uint32_t own) {
    for (std::uint32_t number = 0; number < last + 3; ++number) {
      rank.post(number, own);
      const Bytes got = rank.receive(number, 0);
      if (number < last)
        EXPECT_EQ(got, wanted(number, own)) << number;
      else
        EXPECT_EQ(got, Bytes(got.size(), untouched)) << number;
    }
  });
  for (const auto& member : node.members) EXPECT_NE(load_acquire(member->device.mailbox.lost), 0U);
  EXPECT_EQ(node.members[1]->proxy->failure().code(), ErrorCode::peer_lost);
}

}  // namespace
}  // namespace r2ccl
