// Memory runs out in an engine: typed errors on every rank, no rail is charged, the process lives.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "job.hpp"

namespace {

// Slots are allocated by aligned_alloc().
std::atomic<bool> no_slots{false};

}  // namespace

// Replaces the function of the C library.
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  void* memory = nullptr;
  if (no_slots || ::posix_memalign(&memory, std::max(alignment, sizeof(void*)), bytes) != 0)
    return nullptr;
  return memory;
}

namespace r2ccl {
namespace {

using testing::Job;

constexpr std::size_t elements = 100'000;  // more than a copy, less than a slot

Status send(Communicator& communicator, std::size_t count) {
  const std::vector<float> data(count, 1.0F);
  return communicator.send_to(reinterpret_cast<const std::byte*>(data.data()), count, DType::f32,
                              1);
}

Status receive(Communicator& communicator, std::size_t count) {
  std::vector<float> data(count);
  return communicator.receive_from(reinterpret_cast<std::byte*>(data.data()), count, DType::f32, 0);
}

// Rails may come up late, and be suspected for a moment.
void expect_no_rail_lost(const Job& job) {
  for (std::size_t rank = 0; rank < job.engines.size(); ++rank)
    for (const JournalRecord& record : job.records(rank)) {
      const bool lost = record.kind == JournalKind::rail_state && record.value == 1;
      EXPECT_FALSE(lost) << "rail " << record.rail << " of rank " << rank << ", cause "
                         << int{record.cause};
    }
  EXPECT_TRUE(job.all_up());
}

// The message is the first of a communicator that the receiver has not made.  The background thread
// receives.
TEST(OutOfMemory, AMessageWithoutMemoryFailsItsCommunicatorAlone) {
  Job job({.ranks = 2, .config = {}});
  const auto from = job.make_part(1U << 20, {0, 1}, 0);
  no_slots = true;
  const Status sent = send(*from, elements);
  EXPECT_EQ(sent.code(), ErrorCode::internal) << sent.message();
  EXPECT_NE(sent.message().find("out of memory"), std::string::npos) << sent.message();
  no_slots = false;
  const auto to = job.make_part(1U << 20, {0, 1}, 1);
  EXPECT_EQ(receive(*to, elements).code(), ErrorCode::internal);
  expect_no_rail_lost(job);
  job.run([&](int rank, Communicator& communicator) {
    const Status status =
        rank == 0 ? send(communicator, elements) : receive(communicator, elements);
    EXPECT_TRUE(status.ok()) << status.message();
  });
}

// The receiver waits in a call, and its thread reads the message.
TEST(OutOfMemory, AWaitingCallEndsWithAnErrorOnEveryRank) {
  Job job({.ranks = 2, .config = {}});
  no_slots = true;
  job.run([&](int rank, Communicator& communicator) {
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const Status status = rank == 0 ? send(communicator, 1000) : receive(communicator, 1000);
    if (rank == 1) {
      EXPECT_EQ(status.code(), ErrorCode::internal) << status.message();
    }
    const Status next = communicator.barrier();
    EXPECT_EQ(next.code(), ErrorCode::internal) << next.message();
  });
  no_slots = false;
  expect_no_rail_lost(job);
}

}  // namespace
}  // namespace r2ccl
