// Ranks with a fake GPU (a library in place of the CUDA driver), for tests of stream collectives.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "device/stream_communicator.hpp"
#include "job.hpp"

namespace r2ccl::testing {

using device::StreamCommunicator;
using device::StreamOptions;

// Calls functions of the fake driver by name, for tests.
struct Fake {
  Fake() : library(::dlopen(R2CCL_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL)) {
    EXPECT_NE(library, nullptr) << ::dlerror();
  }
  template <typename... Arguments>
  int call(const char* name, Arguments... arguments) const {
    auto* function = reinterpret_cast<int (*)(Arguments...)>(::dlsym(library, name));
    return function == nullptr ? -1 : function(arguments...);
  }
  void* library;
};

inline const Fake& fake() {
  static const Fake loaded;
  return loaded;
}

// Allocations of the fake GPU since the object was made. Memory shared in a failed exchange stays
// until the process ends, so earlier tests may have left some.
class LiveMemory {
 public:
  [[nodiscard]] int grown() const { return count() - before_; }

 private:
  static int count() { return fake().call("fake_cuda_live_memory"); }
  int before_ = count();
};

inline StreamOptions options(std::uint64_t staging_bytes = 1U << 16U) {
  static constexpr std::array image{std::byte{1}};
  StreamOptions made;
  made.library = R2CCL_FAKE_CUDA;
  made.staging_bytes = staging_bytes;
  made.image = {.binary = image};
  return made;
}

template <typename T>
cuda::Address address(const std::vector<T>& memory) {
  return reinterpret_cast<std::uintptr_t>(memory.data());
}

// A rank with a separate stream.  Create all ranks before the first operation: they share a GPU.
struct Rank {
  Rank(Communicator& communicator, std::uint64_t staging_bytes = 1U << 16U,
       device::NodeOptions node = {}, device::DirectOptions direct = {}) {
    StreamOptions wanted = options(staging_bytes);
    wanted.node = std::move(node);
    wanted.direct = direct;
    auto created = StreamCommunicator::create(communicator, wanted);
    EXPECT_TRUE(created.ok()) << created.take_status().message();
    collectives = std::move(created.value());
    EXPECT_EQ(fake().call("cuStreamCreate", &stream, 0U), 0);
    EXPECT_TRUE(communicator.barrier().ok());
  }
  ~Rank() {
    collectives->close();
    if (graph != nullptr) fake().call("cuGraphExecDestroy", graph);
    fake().call("cuStreamDestroy_v2", stream);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void synchronise() const { EXPECT_EQ(fake().call("cuStreamSynchronize", stream), 0); }
  // Adds work to the stream as a host function.
  void add(std::function<void()>& work) const {
    auto* run = +[](void* given) { (*static_cast<std::function<void()>*>(given))(); };
    EXPECT_EQ(fake().call("cuLaunchHostFunc", stream, run, static_cast<void*>(&work)), 0);
  }
  void capture(const std::function<void()>& body) {
    void* captured = nullptr;
    EXPECT_EQ(fake().call("cuStreamBeginCapture_v2", stream, 0), 0);
    body();
    EXPECT_EQ(fake().call("cuStreamEndCapture", stream, &captured), 0);
    EXPECT_EQ(fake().call("cuGraphInstantiateWithFlags", &graph, captured, 0ULL), 0);
    fake().call("cuGraphDestroy", captured);
  }
  void replay() const { EXPECT_EQ(fake().call("cuGraphLaunch", graph, stream), 0); }

  std::unique_ptr<StreamCommunicator> collectives;
  cuda::Stream stream = nullptr;
  void* graph = nullptr;
};

inline std::vector<float> values(std::size_t count, int rank, std::size_t turn) {
  std::minstd_rand random(static_cast<unsigned>(rank * 7919 + static_cast<int>(turn) + 1));
  std::normal_distribution<float> normal;
  std::vector<float> made(count);
  std::ranges::generate(made, [&] { return normal(random); });
  return made;
}

inline const std::byte* bytes(const std::vector<float>& data) {
  return reinterpret_cast<const std::byte*>(data.data());
}
inline std::byte* bytes(std::vector<float>& data) {
  return reinterpret_cast<std::byte*>(data.data());
}

// Runs every collective on the stream and on the host, and compares the results bit for bit.
inline void compare_all(Rank& rank, Communicator& host, std::size_t count, std::size_t turn) {
  const int me = host.rank();
  const auto ranks = static_cast<std::size_t>(host.size());
  const int root = static_cast<int>(turn % ranks);
  std::vector<std::size_t> even(ranks, count);
  std::vector<std::size_t> uneven(ranks);
  for (std::size_t i = 0; i < ranks; ++i)
    uneven[i] = (count * (i + turn) / ranks + i) % (count + 3);
  StreamCommunicator& gpu = *rank.collectives;
  const auto expect_same = [&](const char* what, std::size_t in_count, std::size_t out_count,
                               auto on_stream, auto on_host) {
    const std::vector<float> in = values(in_count, me, turn);
    std::vector<float> got(out_count, -1.0F);
    std::vector<float> wanted(out_count, -1.0F);
    const Status first = on_stream(in, got);
    ASSERT_TRUE(first.ok()) << what << ": " << first.message();
    rank.synchronise();
    const Status second = on_host(in, wanted);
    ASSERT_TRUE(second.ok()) << what << ": " << second.message();
    const Status after = gpu.failure();
    ASSERT_TRUE(after.ok()) << what << ": " << after.message();
    EXPECT_TRUE(out_count == 0 ||
                std::memcmp(got.data(), wanted.data(), out_count * sizeof(float)) == 0)
        << what << " of " << count << ", turn " << turn << ", rank " << me;
  };
  expect_same(
      "all_reduce", count, count,
      [&](const auto& in, auto& out) {
        return gpu.all_reduce(rank.stream, address(in), address(out), count, DType::f32,
                              ReduceOp::sum, Algorithm::automatic);
      },
      [&](const auto& in, auto& out) {
        return host.all_reduce(bytes(in), bytes(out), count, DType::f32, ReduceOp::sum,
                               Algorithm::automatic);
      });
  const ReduceOp op = turn % 2 == 0 ? ReduceOp::sum : ReduceOp::max;
  for (const auto& counts : {even, uneven}) {
    const std::size_t own = counts[static_cast<std::size_t>(me)];
    const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    expect_same(
        "all_gatherv", own, total,
        [&](const auto& in, auto& out) {
          return gpu.all_gatherv(rank.stream, address(in), address(out), counts, DType::f32);
        },
        [&](const auto& in, auto& out) {
          return host.all_gatherv(bytes(in), bytes(out), counts, DType::f32);
        });
    expect_same(
        "reduce_scatterv", total, own,
        [&](const auto& in, auto& out) {
          return gpu.reduce_scatterv(rank.stream, address(in), address(out), counts, DType::f32,
                                     op);
        },
        [&](const auto& in, auto& out) {
          return host.reduce_scatterv(bytes(in), bytes(out), counts, DType::f32, op);
        });
    expect_same(
        "gather", own, total,
        [&](const auto& in, auto& out) {
          return gpu.gather(rank.stream, address(in), address(out), counts, DType::f32, root);
        },
        [&](const auto& in, auto& out) {
          return host.gather(bytes(in), bytes(out), counts, DType::f32, root);
        });
  }
  expect_same(
      "broadcast", count, count,
      [&](const auto& in, auto& out) {
        if (me == root) out = in;
        return gpu.broadcast(rank.stream, address(out), count, DType::f32, root);
      },
      [&](const auto& in, auto& out) {
        if (me == root) out = in;
        return host.broadcast(bytes(out), count, DType::f32, root);
      });
  expect_same(
      "all_to_all", count * ranks, count * ranks,
      [&](const auto& in, auto& out) {
        return gpu.all_to_all(rank.stream, address(in), address(out), count, DType::f32);
      },
      [&](const auto& in, auto& out) {
        return host.all_to_allv(bytes(in), even, bytes(out), even, DType::f32);
      });
  const int next = (me + 1) % host.size();
  const int before = (me + host.size() - 1) % host.size();
  expect_same(
      "send and recv", count, count,
      [&](const auto& in, auto& out) {
        R2CCL_TRY(gpu.send_to(rank.stream, address(in), count, DType::f32, next));
        return gpu.receive_from(rank.stream, address(out), count, DType::f32, before);
      },
      [&](const auto& in, auto& out) {
        R2CCL_TRY(host.send_to(bytes(in), count, DType::f32, next));
        return host.receive_from(bytes(out), count, DType::f32, before);
      });
  const Status reached = gpu.barrier(rank.stream);
  EXPECT_TRUE(reached.ok()) << reached.message();
}

// Nodes of two ranks, with the exchange of GPU data inside each node.
struct Nodes {
  explicit Nodes(const Config& config = {}, int nodes = 2, int verbs = 0)
      : job({.ranks = 2 * nodes, .rails = 2, .per_node = 2, .verbs = verbs, .config = config}),
        of_streams(job.make_communicators(77)) {
    std::array<std::vector<int>, 2> of_local_rank;
    for (int node = 0; node < nodes; ++node) {
      ranks.push_back({2 * node, 2 * node + 1});
      for (int local_rank = 0; local_rank < 2; ++local_rank)
        of_local_rank[static_cast<std::size_t>(local_rank)].push_back(2 * node + local_rank);
    }
    for (int rank = 0; rank < 2 * nodes; ++rank)
      inter_node.push_back(job.make_part(static_cast<std::uint64_t>(80 + rank % 2),
                                         of_local_rank[static_cast<std::size_t>(rank % 2)], rank));
    EXPECT_TRUE(job.all_up());
  }
  std::unique_ptr<Rank> rank(int me, std::uint64_t staging_bytes = 1U << 16U,
                             device::DirectOptions direct = {}) {
    const auto at = static_cast<std::size_t>(me);
    return std::make_unique<Rank>(*of_streams[at], staging_bytes,
                                  device::NodeOptions{inter_node[at].get(), ranks}, direct);
  }

  Job job;
  std::vector<std::unique_ptr<Communicator>> of_streams;  // all ranks; by rank
  std::vector<std::unique_ptr<Communicator>> inter_node;  // inter-node group of each rank
  std::vector<std::vector<int>> ranks;
};

}  // namespace r2ccl::testing
