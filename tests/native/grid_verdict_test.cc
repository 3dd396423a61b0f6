// The blocks of a grid look for an end at different times.  Where one of them gives up and another
// does its part, nothing of the step may count as good: no post, no word to a neighbour but `lost`.
//
// The first tests run the bodies alone, block by block in both orders.  The others run whole grids
// on the fake driver, whose blocks run at the same time, with and without the planted bug.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device/direct_bodies.hpp"
#include "device/exchange_bodies.hpp"
#include "drivers/cuda_device.hpp"

namespace r2ccl {
namespace {

using device::DeviceState;
using device::Exchange;
using device::Inbox;
using device::load_acquire;
using device::Mailbox;
using device::Rows;
using device::Shared;
using device::store_release;
using device::Sum;
using device::ThreadPosition;

constexpr std::uint64_t bytes = 256;
constexpr std::uint64_t entry_bytes = 1024;  // an input, and a result behind it
constexpr std::uint64_t result_offset = 512;
constexpr std::uint32_t plan = 7;
constexpr std::byte untouched{0xA5};
constexpr std::byte brought{1};

struct alignas(128) Memory {
  std::array<std::byte, device::ring * entry_bytes> data{};
};

// A rank of a node of two, before its first exchange.
struct Rank {
  Mailbox mailbox;
  DeviceState state;
  Inbox own, other;
  Memory memory, others_memory, staged;
  std::array<std::byte, bytes> source{};
  std::array<std::byte, bytes> target{};
  Exchange exchange{};

  Rank() {
    for (Memory* each : {&memory, &others_memory}) each->data.fill(brought);
    staged.data.fill(untouched);
    source.fill(brought);
    target.fill(untouched);
    exchange.mailbox = &mailbox;
    exchange.state = &state;
    exchange.staging = {staged.data.data(), entry_bytes, result_offset};
    exchange.node.ranks = 2;
    exchange.node.inboxes[0] = &own;
    exchange.node.inboxes[1] = &other;
    exchange.node.memory[0] = memory.data.data();
    exchange.node.memory[1] = others_memory.data.data();
    exchange.node.entry_bytes = entry_bytes;
    exchange.node.result_offset = result_offset;
  }

  // All that any kernel of the first exchange waits for has come, or has not.
  void set_ready(bool ready) {
    for (auto* words : {&own.shared, &own.spread})
      for (device::Word& word : *words) store_release(word, ready ? 1 : 0);
    store_release(mailbox.arrived, ready ? 1 : 0);
  }
  void set_lost(bool lost) { store_release(own.lost, lost ? 1 : 0); }

  // What this rank has told as good.
  [[nodiscard]] std::vector<std::string> claims() {
    std::vector<std::string> all;
    if (load_acquire(mailbox.posted) != 0) all.emplace_back("posted");
    for (const auto& [name, words] : {std::pair{"shared", &Inbox::shared},
                                      {"summed", &Inbox::summed},
                                      {"spread", &Inbox::spread},
                                      {"collected", &Inbox::collected}})
      if (load_acquire((other.*words)[0]) != 0) all.emplace_back(name);
    return all;
  }
  [[nodiscard]] bool told_lost() const {
    return load_acquire(other.lost) != 0 && load_acquire(mailbox.lost) != 0;
  }
};

struct OneThread : device::Spinning {
  void sync() const {}
};

// A kernel of one exchange and how it is called for one block.
struct NamedBody {
  const char* name;
  bool begun;  // the kernel comes after the collective was posted
  bool tells;  // has local peers to tell
  std::function<void(Rank&, const ThreadPosition&, Shared&)> body;
};

const std::vector<NamedBody>& bodies() {
  static const std::vector<NamedBody> all{
      {"stage", false, false,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         stage(at, OneThread(), shared, rank.mailbox, rank.state, rank.exchange.staging,
               rank.source.data(), {1, bytes}, plan, true);
       }},
      {"share", false, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         share(at, OneThread(), shared, rank.exchange, rank.source.data(), {1, bytes}, true);
       }},
      {"sum_up", false, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         sum_up(at, OneThread(), shared, rank.exchange, {1, bytes}, DType::u8, ReduceOp::sum, plan,
                true);
       }},
      {"bring", false, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         bring(at, OneThread(), shared, rank.exchange, rank.source.data(), bytes, 0, plan);
       }},
      {"spread", true, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         spread(at, OneThread(), shared, rank.exchange, bytes, Sum(), 0);
       }},
      {"collect", true, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         device::Results results{};
         results.of[0] = {1, bytes / 2};
         results.of[1] = {1, bytes / 2, 0, 0, bytes / 2};
         collect(at, OneThread(), shared, rank.exchange, results, rank.target.data(), 0, true);
       }},
      {"take", true, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         take(at, OneThread(), shared, rank.exchange, rank.target.data(), bytes, Sum(), 0);
       }},
      {"combine", true, false,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         combine(at, OneThread(), shared, rank.mailbox, rank.state, rank.exchange.staging,
                 &rank.own, bytes, 0, Sum(), plan);
       }},
  };
  return all;
}

void run_block(Rank& rank, const NamedBody& kernel, std::uint32_t block, std::uint32_t blocks,
               bool gives_up) {
  rank.set_ready(!gives_up);
  rank.set_lost(gives_up);
  if (std::strcmp(kernel.name, "stage") == 0) store_release(rank.mailbox.abort, gives_up ? 1 : 0);
  Shared shared{};
  kernel.body(rank, {block, blocks, 0, 1}, shared);
}

void begin(Rank& rank, const NamedBody& kernel) {
  if (kernel.begun) rank.state.sequence = rank.state.exchange = 1;
}

TEST(GridVerdict, AStepInWhichABlockGivesUpIsNotGood) {
  for (const NamedBody& kernel : bodies())
    for (std::uint32_t blocks : {1U, 2U, 3U, 16U})
      for (std::uint32_t gives_up = 0; gives_up < blocks; ++gives_up)
        for (const bool backwards : {false, true}) {
          SCOPED_TRACE(std::string(kernel.name) + ", block " + std::to_string(gives_up) + " of " +
                       std::to_string(blocks) + (backwards ? ", backwards" : ""));
          Rank rank;
          begin(rank, kernel);
          for (std::uint32_t i = 0; i < blocks; ++i) {
            const std::uint32_t block = backwards ? blocks - 1 - i : i;
            run_block(rank, kernel, block, blocks, block == gives_up);
          }
          EXPECT_EQ(rank.claims(), std::vector<std::string>());
          EXPECT_EQ(rank.told_lost(), kernel.tells);
          EXPECT_EQ(rank.state.reports, 0U);
        }
}

TEST(GridVerdict, AStepInWhichAllBlocksDoTheirPartIsGood) {
  for (const NamedBody& kernel : bodies()) {
    SCOPED_TRACE(kernel.name);
    Rank rank;
    begin(rank, kernel);
    for (std::uint32_t block = 0; block < 3; ++block) run_block(rank, kernel, block, 3, false);
    EXPECT_FALSE(rank.claims().empty());
    EXPECT_FALSE(rank.told_lost());
    EXPECT_EQ(rank.state.reports, 0U);
  }
}

TEST(GridVerdict, WhatOneKernelOfAStepGaveUpTheNextOneDoesNotForget) {
  DeviceState state;
  const auto kernel = [&](bool first_goes, bool second_goes, bool closes) {
    Shared first{0, 0, first_goes};
    Shared second{0, 0, second_goes};
    EXPECT_FALSE(ends_step({0, 2, 0, 1}, first, state, closes));
    EXPECT_EQ(ends_step({1, 2, 0, 1}, second, state, closes), closes);
    return second.go;
  };
  for (int i = 0; i < 70'000; ++i) (void)kernel(false, false, false);  // the count cannot run over
  EXPECT_FALSE(kernel(true, true, true));
  EXPECT_TRUE(kernel(true, true, false));
  EXPECT_FALSE(kernel(false, true, false));
  EXPECT_FALSE(kernel(true, true, false));
  EXPECT_FALSE(kernel(true, true, true));
  EXPECT_TRUE(kernel(true, true, true)) << "the next step has its own verdict";
}

TEST(GridVerdict, TheLastResultCountsAlsoIfTheEndIsPublishedRightAfterIt) {
  int looks = 0;
  const auto ready = [&] { return looks++ > 0; };  // between the two looks of one turn
  EXPECT_TRUE(OneThread().wait(ready, [] { return true; }));
}

TEST(GridVerdict, NothingIsTakenFromANodeThatHasLostARank) {
  for (const NamedBody& kernel : bodies()) {
    if (std::strcmp(kernel.name, "collect") != 0 && std::strcmp(kernel.name, "take") != 0) continue;
    SCOPED_TRACE(kernel.name);
    Rank rank;
    begin(rank, kernel);
    rank.set_ready(true);
    rank.set_lost(true);
    Shared shared{};
    kernel.body(rank, {0, 1, 0, 1}, shared);
    EXPECT_TRUE(std::ranges::all_of(rank.target, [](std::byte b) { return b == untouched; }));
    EXPECT_TRUE(rank.told_lost());
  }
}

// A neighbour tells `lost` and gives its memory back while a block reads that memory.
struct LostWhileRead : device::Spinning {
  Rank* rank;
  mutable int syncs = 0;
  explicit LostWhileRead(Rank* among) : rank(among) {}
  void sync() const {
    if (++syncs == 2) rank->set_lost(true);  // the part is done
  }
};

TEST(GridVerdict, WhatWasReadOfANeighbourThatIsLostMeanwhileIsNotGood) {
  for (const bool sums_up : {true, false}) {
    SCOPED_TRACE(sums_up ? "sum_up" : "collect");
    Rank rank;
    rank.set_ready(true);
    Shared shared{};
    if (sums_up) {
      sum_up({0, 1, 0, 1}, LostWhileRead(&rank), shared, rank.exchange, {1, bytes}, DType::u8,
             ReduceOp::sum, plan, true);
    } else {
      rank.state.sequence = rank.state.exchange = 1;
      device::Results results{};
      results.of[0] = {1, bytes};
      collect({0, 1, 0, 1}, LostWhileRead(&rank), shared, rank.exchange, results,
              rank.target.data(), 0, true);
    }
    EXPECT_EQ(rank.claims(), std::vector<std::string>());
    EXPECT_TRUE(rank.told_lost());
  }
}

TEST(GridVerdict, ARankThatDepartsWithoutItsNeighboursTellsThem) {
  for (const bool collected : {true, false}) {
    Rank rank;
    rank.state.exchange = 1;
    for (device::Word& word : rank.own.collected) store_release(word, collected ? 1 : 0);
    store_release(rank.mailbox.abort, 1);
    depart(OneThread(), rank.exchange);
    EXPECT_EQ(rank.told_lost(), !collected);
  }
}

// ---- grids of the fake driver ----

struct Driver {
  explicit Driver(const char* path) : library(::dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    static constexpr std::byte image[1]{};
    auto opened = cuda::Device::open(path, 0, {.binary = image});
    if (opened.ok())
      device = std::move(opened.value());
    else
      ADD_FAILURE() << opened.take_status().message();
  }
  template <typename Argument>
  void call(const char* name, Argument argument) const {
    const auto function = reinterpret_cast<int (*)(Argument)>(::dlsym(library, name));
    ASSERT_NE(function, nullptr) << name;
    EXPECT_EQ(function(argument), 0) << name;
  }

  void* library;
  std::unique_ptr<cuda::Device> device;
};

constexpr unsigned all_blocks = ~0U;

// A neighbour says `lost` while the host is alive: a block that has looked gives up.  The result
// arrives; a block that begins only then takes it, and ends last.
std::vector<std::string> claims_of_spread(const Driver& driver) {
  Rank rank;
  rank.state.sequence = rank.state.exchange = 1;
  rank.set_lost(true);
  auto kernel = driver.device->kernel("r2ccl_spread");
  EXPECT_TRUE(kernel.ok());
  driver.call("fake_cuda_hold_blocks", 1U);
  std::thread stream([&] {
    std::uint64_t size = bytes;
    Sum sum;
    std::uint32_t lag = 0;
    void* arguments[] = {&rank.exchange, &size, &sum, &lag};
    EXPECT_TRUE(driver.device->launch(kernel.value(), 2, 128, nullptr, arguments).ok());
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (__atomic_load_n(&rank.state.reports, __ATOMIC_ACQUIRE) == 0 &&
         std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  EXPECT_NE(__atomic_load_n(&rank.state.reports, __ATOMIC_ACQUIRE), 0U) << "no block gave up";
  store_release(rank.mailbox.arrived, 1);
  driver.call("fake_cuda_hold_blocks", all_blocks);
  stream.join();
  EXPECT_EQ(rank.told_lost(), rank.claims().empty());
  return rank.claims();
}

TEST(GridVerdict, OnTheFakeDriverBlocksThatDisagreeAreNotGood) {
  const Driver driver(R2CCL_FAKE_CUDA);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(claims_of_spread(driver), std::vector<std::string>());
}

TEST(GridVerdict, OnTheFakeDriverABlockThatDecidesAloneIsCaught) {
  const Driver driver(R2CCL_FAKE_CUDA_MUTANTS);
  EXPECT_EQ(claims_of_spread(driver), std::vector<std::string>());
  driver.call("fake_cuda_plant", "block_decides_alone");
  EXPECT_EQ(claims_of_spread(driver), std::vector<std::string>{"spread"});
  driver.call("fake_cuda_plant", "none");
}

// Two kernels on two streams, each of which waits for what the other one's blocks do.
TEST(GridVerdict, OnTheFakeDriverGridsOfManyBlocksWaitForEachOther) {
  const Driver driver(R2CCL_FAKE_CUDA);
  Rank first;
  Rank second;
  for (Rank* rank : {&first, &second}) {
    rank->memory.data.fill(untouched);
    device::LocalPeers& node = rank->exchange.node;
    node.own = rank == &first ? 0 : 1;
    node.inboxes[0] = &first.own;
    node.inboxes[1] = &second.own;
    node.memory[0] = first.memory.data.data();
    node.memory[1] = second.memory.data.data();
  }
  auto share = driver.device->kernel("r2ccl_share");
  auto sum_up = driver.device->kernel("r2ccl_sum_up");
  ASSERT_TRUE(share.ok());
  ASSERT_TRUE(sum_up.ok());
  const auto run = [&](Rank& rank) {
    const std::byte* source = rank.source.data();
    Rows rows{1, bytes};
    bool last = true;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    std::uint32_t posted_as = plan;
    void* sharing[] = {&rank.exchange, &source, &rows, &last};
    EXPECT_TRUE(driver.device->launch(share.value(), 16, 256, nullptr, sharing).ok());
    void* summing[] = {&rank.exchange, &rows, &dtype, &op, &posted_as, &last};
    EXPECT_TRUE(driver.device->launch(sum_up.value(), 16, 256, nullptr, summing).ok());
  };
  std::thread other([&] { run(second); });
  run(first);
  other.join();
  for (Rank* rank : {&first, &second}) {
    EXPECT_EQ(load_acquire(rank->mailbox.posted), 1U);
    const std::byte* const staged = rank->exchange.staging.input(1);
    EXPECT_TRUE(std::all_of(staged, staged + bytes, [](std::byte b) { return b == std::byte{2}; }));
  }
}

}  // namespace
}  // namespace r2ccl
