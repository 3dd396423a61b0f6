// Memory without CPU access, reached by RDMA devices through a dma-buf.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "exported_memory.hpp"
#include "job.hpp"

namespace r2ccl {
namespace {

using testing::ExportedMemory;
using testing::Job;

void fill(std::span<std::byte> bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>((i * 31 + i / 4096 + seed) % 251);
}

// ---- devices ----

class DmaBufDevices : public ::testing::Test {
 protected:
  struct End {
    std::unique_ptr<VerbsDevice> device;
    std::unique_ptr<VerbsQueuePair> pair;
    ExportedMemory gpu{1 << 16};
    std::unique_ptr<VerbsMemory> memory;
  };
  DmaBufDevices() {
    for (const std::size_t i : {0U, 1U}) {
      const std::string name = "rdma" + std::to_string(i);
      verbs->add_device(name);
      End& end = ends[i];
      end.device = std::move(verbs->open(name).value());
      end.pair =
          std::move(end.device->create_queue_pair(1, 0, {.sends = 8, .receives = 8}).value());
      end.memory = std::move(share(end, end.gpu.addresses()).value());
      fill(end.gpu.bytes(), static_cast<unsigned>(i));
    }
    for (const std::size_t i : {0U, 1U})
      EXPECT_EQ(ends[i].pair->connect({.queue_pair = ends[i].pair->number()},
                                      {.queue_pair = ends[1 - i].pair->number()}, {}),
                0);
    source_key = ends[0].memory->local_key();
    target_key = ends[1].memory->remote_key();
  }
  static Result<std::unique_ptr<VerbsMemory>> share(const End& end,
                                                    std::span<std::byte> addresses) {
    return end.device->share_dma_buf(end.gpu.dma_buf().get(), addresses, true);
  }
  // Writes from the memory of end 0 to the memory of end 1. Returns the completion, if there is
  // any.
  std::optional<VerbsCompletion> write(std::size_t from, std::size_t to, std::uint32_t bytes) {
    const VerbsWrite request{
        .source = {ends[0].gpu.addresses().data() + from, bytes, source_key},
        .remote_address = reinterpret_cast<std::uintptr_t>(ends[1].gpu.addresses().data() + to),
        .remote_key = target_key,
        .signaled = true};
    EXPECT_EQ(ends[0].pair->post({&request, 1}), 0);
    std::array<VerbsCompletion, 1> done;
    if (ends[0].pair->poll(done) == 0) return std::nullopt;
    return done[0];
  }

  std::shared_ptr<FakeVerbs> verbs = std::make_shared<FakeVerbs>();
  std::array<End, 2> ends;
  std::uint32_t source_key = 0;
  std::uint32_t target_key = 0;
};

TEST_F(DmaBufDevices, ReadAndWriteADmaBufWithoutCpuAccess) {
  ASSERT_TRUE(write(4000, 8000, 5000)->ok);
  const auto target = ends[1].gpu.bytes();
  EXPECT_TRUE(
      std::ranges::equal(target.subspan(8000, 5000), ends[0].gpu.bytes().subspan(4000, 5000)));
  std::vector<std::byte> before(target.size());
  fill(before, 1);
  EXPECT_TRUE(std::ranges::equal(target.first(8000), std::span(before).first(8000)));
  EXPECT_TRUE(std::ranges::equal(target.subspan(13000), std::span(before).subspan(13000)));
  EXPECT_EQ(verbs->written(ends[1].gpu.addresses().data()), 5000U);
}

TEST_F(DmaBufDevices, DoNotWriteBeyondTheEnd) {
  EXPECT_EQ(write(0, (1 << 16) - 100, 101)->status, "remote access error");
}

TEST_F(DmaBufDevices, DoNotReadBeyondTheEnd) { EXPECT_FALSE(write((1 << 16) - 100, 0, 101)->ok); }

TEST_F(DmaBufDevices, DoNotReadDeregisteredMemory) {
  EXPECT_EQ(ends[0].memory->deregister(), 0);
  EXPECT_FALSE(write(0, 0, 100)->ok);
}

TEST_F(DmaBufDevices, DoNotWriteDeregisteredMemory) {
  EXPECT_EQ(ends[1].memory->deregister(), 0);
  EXPECT_FALSE(write(0, 0, 100)->ok);
}

TEST_F(DmaBufDevices, RefuseAnUnalignedStartOrASizeBeyondTheEnd) {
  const auto refusal = [&](std::span<std::byte> addresses) {
    return share(ends[0], addresses).take_status().message();
  };
  EXPECT_NE(refusal(ends[0].gpu.addresses().subspan(100)).find("Invalid"), std::string::npos);
  const ExportedMemory larger(1 << 17);
  EXPECT_NE(refusal(larger.addresses()).find("Invalid"), std::string::npos);
  EXPECT_EQ(refusal(larger.addresses().first(100)), "");
}

// ---- engines ----

Job::Options options(int rails = 2, int verbs = 2, const Config& config = {}) {
  return {.ranks = 2,
          .rails = rails,
          .shm = false,
          .devices = false,
          .verbs = verbs,
          .config = config,
          .listening = {}};
}

// Larger than the staging memory, and without a small last chunk, so that the engine copies
// nothing.
constexpr std::size_t bytes_sent = 8U << 20U;

class DmaBufEngines : public ::testing::Test {
 protected:
  // Sends from rank 0 to rank 1; the target of rank 1 is host memory.
  void send() {
    std::vector<std::byte> received(bytes_sent);
    job.run([&](int rank, Communicator& communicator) {
      const Status status =
          rank == 0 ? communicator.send_to(gpu.addresses().data(), bytes_sent, DType::u8, 1)
                    : communicator.receive_from(received.data(), bytes_sent, DType::u8, 0);
      EXPECT_TRUE(status.ok()) << status.message();
    });
    EXPECT_TRUE(std::ranges::equal(received, gpu.bytes()));
  }
  Status register_it() { return job.engines[0]->register_dma_buf(gpu.addresses(), gpu.dma_buf()); }

  ExportedMemory gpu{bytes_sent};
  Job job{options()};
};

TEST_F(DmaBufEngines, SendFromADmaBufWithoutCpuAccess) {
  const Status status = register_it();
  ASSERT_TRUE(status.ok()) << status.message();
  for (unsigned seed = 1; seed < 4; ++seed) {
    fill(gpu.bytes(), seed);
    send();
  }
  EXPECT_TRUE(job.engines[0]->deregister_buffer(gpu.addresses().data()).ok());
  EXPECT_FALSE(job.engines[0]->deregister_buffer(gpu.addresses().data()).ok());
}

TEST_F(DmaBufEngines, SendFromADmaBufOverTheRemainingRail) {
  ASSERT_TRUE(register_it().ok());
  fill(gpu.bytes(), 5);
  job.verbs->mute_at(Job::verbs_device(0, 0), gpu.addresses());
  send();
  job.verbs->mute_at(Job::verbs_device(0, 0), {});
  job.verbs->mute(Job::verbs_device(0, 0), false);
  send();
}

TEST_F(DmaBufEngines, NameTheDeviceThatRefusesADmaBuf) {
  job.verbs->refuse_dma_bufs(Job::verbs_device(0, 1), EOPNOTSUPP);
  const Status status = register_it();
  EXPECT_NE(status.message().find(Job::verbs_device(0, 1)), std::string::npos) << status.message();
  EXPECT_FALSE(job.engines[0]->deregister_buffer(gpu.addresses().data()).ok());
}

// ---- obstacles to GPUDirect ----

// Returns the obstacle to RDMA reach between all ranks, as rank 0 reports it; empty = none.
std::string obstacle(const Job& job, std::vector<std::uint32_t> also = {}) {
  for (const auto& engine : job.engines) also.push_back(engine->process());
  const Status status = job.engines[0]->check_reach(also);
  EXPECT_TRUE(status.ok() || status.code() == ErrorCode::invalid_argument);
  return status.message();
}

TEST(Reach, NeedsAnRdmaRailToEveryPeer) {
  EXPECT_EQ(obstacle(Job(options(2, 2))), "");
  EXPECT_EQ(obstacle(Job(options(2, 1))), "");
  EXPECT_EQ(obstacle(Job(options(2, 0))), "no rail to rank 1 is RDMA");
  EXPECT_EQ(obstacle(Job(options(1, 1)), {1}), "process 1 is no peer");
  Job::Options near = options(1, 0);
  near.shm = true;
  EXPECT_EQ(obstacle(Job(near)), "rank 1 is on this node: its rail is shared memory");
}

TEST(Reach, NeedsChecksumsOff) {
  Config config;
  config.checksum = true;
  EXPECT_EQ(obstacle(Job(options(1, 1, config))),
            "checksums are on (R2CCL_CHECKSUM): the CPU computes them");
}

}  // namespace
}  // namespace r2ccl
