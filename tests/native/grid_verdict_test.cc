// Verdict of a grid whose blocks check for an abort at different times. If a single block gives up,
// the step must not count as good: no post, and no signal to a local peer except `lost`.
//
// The first tests run the kernel bodies alone, block by block in both orders. The other tests run
// whole grids on the fake driver with concurrent blocks, with and without the planted bug.
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
using device::Reduction;
using device::Rows;
using device::Shared;
using device::store_release;
using device::ThreadPosition;

constexpr std::uint64_t bytes = 256;
constexpr std::uint64_t entry_bytes = 1024;  // an input, followed by a result
constexpr std::uint64_t result_offset = 512;
constexpr std::uint32_t plan = 7;
constexpr std::byte untouched{0xA5};
constexpr std::byte contributed{1};

struct alignas(128) Memory {
  std::array<std::byte, device::ring * entry_bytes> data{};
};

// A rank of a node with two ranks, before its first exchange.
struct Rank {
  Mailbox mailbox;
  DeviceState state;
  Inbox own, other;
  Memory memory, others_memory, staged;
  std::array<std::byte, bytes> source{};
  std::array<std::byte, bytes> target{};
  Exchange exchange{};

  Rank() {
    for (Memory* each : {&memory, &others_memory}) each->data.fill(contributed);
    staged.data.fill(untouched);
    source.fill(contributed);
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

  // Sets or clears all words that kernels of the first exchange wait for.
  void set_ready(bool ready) {
    for (auto* words : {&own.input_ready, &own.result_ready})
      for (device::Word& word : *words) store_release(word, ready ? 1 : 0);
    store_release(mailbox.arrived, ready ? 1 : 0);
  }
  void set_lost(bool lost) { store_release(own.lost, lost ? 1 : 0); }

  // Returns the names of the steps signalled as good.
  [[nodiscard]] std::vector<std::string> claims() {
    std::vector<std::string> all;
    if (load_acquire(mailbox.posted) != 0) all.emplace_back("posted");
    for (const auto& [name, words] : {std::pair{"input_ready", &Inbox::input_ready},
                                      {"inputs_read", &Inbox::inputs_read},
                                      {"result_ready", &Inbox::result_ready},
                                      {"results_read", &Inbox::results_read}})
      if (load_acquire((other.*words)[0]) != 0) all.emplace_back(name);
    return all;
  }
  [[nodiscard]] bool signalled_lost() const {
    return load_acquire(other.lost) != 0 && load_acquire(mailbox.lost) != 0;
  }
};

struct OneThread : device::SpinWait {
  void sync() const {}
};

// A kernel of an exchange, and its call for a single block.
struct NamedBody {
  const char* name;
  bool begun;    // the kernel runs after the post of the collective
  bool signals;  // the kernel has local peers to signal
  std::function<void(Rank&, const ThreadPosition&, Shared&)> body;
};

const std::vector<NamedBody>& bodies() {
  static const std::vector<NamedBody> all{
      {"stage", false, false,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         stage(at, OneThread(), shared, rank.mailbox, rank.state, rank.exchange.staging,
               rank.source.data(), {1, bytes}, plan, true);
       }},
      {"publish_input", false, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         publish_input(at, OneThread(), shared, rank.exchange, rank.source.data(), {1, bytes},
                       true);
       }},
      {"local_reduce_scatter", false, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         local_reduce_scatter(at, OneThread(), shared, rank.exchange, {1, bytes}, DType::u8,
                              ReduceOp::sum, plan, true);
       }},
      {"stage_in_place", false, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         stage_in_place(at, OneThread(), shared, rank.exchange, rank.source.data(), bytes, 0, plan);
       }},
      {"publish_result", true, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         publish_result(at, OneThread(), shared, rank.exchange, bytes, Reduction(), 0);
       }},
      {"local_all_gather", true, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         device::OutputRows outputs{};
         outputs.of[0] = {1, bytes / 2};
         outputs.of[1] = {1, bytes / 2, 0, 0, bytes / 2};
         local_all_gather(at, OneThread(), shared, rank.exchange, outputs, rank.target.data(), 0,
                          true);
       }},
      {"deliver_shard", true, true,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         deliver_shard(at, OneThread(), shared, rank.exchange, rank.target.data(), bytes,
                       Reduction(), 0);
       }},
      {"reduce_and_post", true, false,
       [](Rank& rank, const ThreadPosition& at, Shared& shared) {
         reduce_and_post(at, OneThread(), shared, rank.mailbox, rank.state, rank.exchange.staging,
                         &rank.own, bytes, 0, Reduction(), plan);
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

TEST(GridVerdict, AStepFailsIfAnyBlockGivesUp) {
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
          EXPECT_EQ(rank.signalled_lost(), kernel.signals);
          EXPECT_EQ(rank.state.reports, 0U);
        }
}

TEST(GridVerdict, AStepSucceedsIfAllBlocksFinish) {
  for (const NamedBody& kernel : bodies()) {
    SCOPED_TRACE(kernel.name);
    Rank rank;
    begin(rank, kernel);
    for (std::uint32_t block = 0; block < 3; ++block) run_block(rank, kernel, block, 3, false);
    EXPECT_FALSE(rank.claims().empty());
    EXPECT_FALSE(rank.signalled_lost());
    EXPECT_EQ(rank.state.reports, 0U);
  }
}

TEST(GridVerdict, AFailedKernelFailsTheWholeStep) {
  DeviceState state;
  const auto kernel = [&](bool first_goes, bool second_goes, bool closes) {
    Shared first{0, 0, first_goes};
    Shared second{0, 0, second_goes};
    EXPECT_FALSE(ends_step({0, 2, 0, 1}, first, state, closes));
    EXPECT_EQ(ends_step({1, 2, 0, 1}, second, state, closes), closes);
    return second.go;
  };
  for (int i = 0; i < 70'000; ++i) (void)kernel(false, false, false);  // no overflow
  EXPECT_FALSE(kernel(true, true, true));
  EXPECT_TRUE(kernel(true, true, false));
  EXPECT_FALSE(kernel(false, true, false));
  EXPECT_FALSE(kernel(true, true, false));
  EXPECT_FALSE(kernel(true, true, true));
  EXPECT_TRUE(kernel(true, true, true)) << "the next step has its own verdict";
}

TEST(GridVerdict, AResultCountsIfAnAbortFollowsAtOnce) {
  int looks = 0;
  const auto ready = [&] { return looks++ > 0; };  // becomes ready between the two checks of a turn
  EXPECT_TRUE(OneThread().wait(ready, [] { return true; }));
}

TEST(GridVerdict, NoResultIsTakenFromANodeWithALostRank) {
  for (const NamedBody& kernel : bodies()) {
    if (std::strcmp(kernel.name, "local_all_gather") != 0 &&
        std::strcmp(kernel.name, "deliver_shard") != 0)
      continue;
    SCOPED_TRACE(kernel.name);
    Rank rank;
    begin(rank, kernel);
    rank.set_ready(true);
    rank.set_lost(true);
    Shared shared{};
    kernel.body(rank, {0, 1, 0, 1}, shared);
    EXPECT_TRUE(std::ranges::all_of(rank.target, [](std::byte b) { return b == untouched; }));
    EXPECT_TRUE(rank.signalled_lost());
  }
}

// A local peer signals `lost` and frees its memory while a block reads from there.
struct LostWhileRead : device::SpinWait {
  Rank* rank;
  mutable int syncs = 0;
  explicit LostWhileRead(Rank* among) : rank(among) {}
  void sync() const {
    if (++syncs == 2) rank->set_lost(true);  // the block's part is done
  }
};

TEST(GridVerdict, DataOfALocalPeerLostWhileReadIsNotPublished) {
  for (const bool reduces : {true, false}) {
    SCOPED_TRACE(reduces ? "local_reduce_scatter" : "local_all_gather");
    Rank rank;
    rank.set_ready(true);
    Shared shared{};
    if (reduces) {
      local_reduce_scatter({0, 1, 0, 1}, LostWhileRead(&rank), shared, rank.exchange, {1, bytes},
                           DType::u8, ReduceOp::sum, plan, true);
    } else {
      rank.state.sequence = rank.state.exchange = 1;
      device::OutputRows outputs{};
      outputs.of[0] = {1, bytes};
      local_all_gather({0, 1, 0, 1}, LostWhileRead(&rank), shared, rank.exchange, outputs,
                       rank.target.data(), 0, true);
    }
    EXPECT_EQ(rank.claims(), std::vector<std::string>());
    EXPECT_TRUE(rank.signalled_lost());
  }
}

TEST(GridVerdict, QuiesceSignalsLostIfLocalPeersHaveNotRead) {
  for (const bool read : {true, false}) {
    Rank rank;
    rank.state.exchange = 1;
    for (device::Word& word : rank.own.results_read) store_release(word, read ? 1 : 0);
    store_release(rank.mailbox.abort, 1);
    quiesce(OneThread(), rank.exchange);
    EXPECT_EQ(rank.signalled_lost(), !read);
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

// Runs publish_result in 2 blocks after a local peer has signalled `lost`. The first block gives
// up. The result arrives then; the second block begins, takes the result, and ends last.
std::vector<std::string> claims_of_publish_result(const Driver& driver) {
  Rank rank;
  rank.state.sequence = rank.state.exchange = 1;
  rank.set_lost(true);
  auto kernel = driver.device->kernel("r2ccl_publish_result");
  EXPECT_TRUE(kernel.ok());
  driver.call("fake_cuda_hold_blocks", 1U);
  std::thread stream([&] {
    std::uint64_t size = bytes;
    Reduction reduction;
    std::uint32_t lag = 0;
    void* arguments[] = {&rank.exchange, &size, &reduction, &lag};
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
  EXPECT_EQ(rank.signalled_lost(), rank.claims().empty());
  return rank.claims();
}

TEST(GridVerdict, DisagreeingBlocksOnTheFakeDriverFailTheStep) {
  const Driver driver(R2CCL_FAKE_CUDA);
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(claims_of_publish_result(driver), std::vector<std::string>());
}

TEST(GridVerdict, ThePlantedBugOnTheFakeDriverIsCaught) {
  const Driver driver(R2CCL_FAKE_CUDA_MUTANTS);
  EXPECT_EQ(claims_of_publish_result(driver), std::vector<std::string>());
  driver.call("fake_cuda_plant", "block_decides_alone");
  EXPECT_EQ(claims_of_publish_result(driver), std::vector<std::string>{"result_ready"});
  driver.call("fake_cuda_plant", "none");
}

// Two kernels on two streams wait for each other's blocks.
TEST(GridVerdict, LargeGridsOnTheFakeDriverWaitForEachOther) {
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
  auto publish_input = driver.device->kernel("r2ccl_publish_input");
  auto reduce_scatter = driver.device->kernel("r2ccl_local_reduce_scatter");
  ASSERT_TRUE(publish_input.ok());
  ASSERT_TRUE(reduce_scatter.ok());
  const auto run = [&](Rank& rank) {
    const std::byte* source = rank.source.data();
    Rows rows{1, bytes};
    bool last = true;
    DType dtype = DType::u8;
    ReduceOp op = ReduceOp::sum;
    std::uint32_t posted_as = plan;
    void* publishing[] = {&rank.exchange, &source, &rows, &last};
    EXPECT_TRUE(driver.device->launch(publish_input.value(), 16, 256, nullptr, publishing).ok());
    void* reducing[] = {&rank.exchange, &rows, &dtype, &op, &posted_as, &last};
    EXPECT_TRUE(driver.device->launch(reduce_scatter.value(), 16, 256, nullptr, reducing).ok());
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
