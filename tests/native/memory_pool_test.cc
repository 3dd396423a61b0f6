// Memory that RDMA devices share.
#include "rails/verbs/memory_pool.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "drivers/fake_verbs.hpp"

namespace r2ccl {
namespace {

class MemoryPoolTest : public ::testing::Test {
 protected:
  MemoryPoolTest() { verbs->add_device("near"); }
  std::shared_ptr<VerbsDevice> open() { return std::move(verbs->open("near").value()); }
  std::span<std::byte> span() { return buffer; }
  // What is freed on threads is freed soon.
  bool regions_become(std::size_t count) {
    for (int i = 0; i < 2000 && verbs->shared_regions() != count; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return verbs->shared_regions() == count;
  }

  std::shared_ptr<FakeVerbs> verbs = std::make_shared<FakeVerbs>();
  std::vector<std::byte> buffer = std::vector<std::byte>(1000);
  MemoryPool pool;
};

TEST_F(MemoryPoolTest, WhatWasRegisteredAheadIsUsed) {
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  const auto device = open();
  auto ahead = pool.known();
  MemoryPool::register_all(*device, ahead);
  ASSERT_EQ(ahead.size(), 1U);
  const std::uint32_t key = ahead[0].with->remote_key();
  ASSERT_TRUE(pool.add_device(device, std::move(ahead)).ok());
  EXPECT_EQ(pool.find("near", buffer.data(), 1000)->remote, key);
}

TEST_F(MemoryPoolTest, ButNotForAnotherBufferAtTheSamePlace) {
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  const auto device = open();
  auto ahead = pool.known();
  MemoryPool::register_all(*device, ahead);
  const std::uint32_t key = ahead[0].with->remote_key();
  ASSERT_TRUE(pool.deregister_buffer(buffer.data()));
  ASSERT_TRUE(pool.register_buffer(span()).ok());  // other pages, perhaps
  ASSERT_TRUE(pool.add_device(device, std::move(ahead)).ok());
  EXPECT_NE(pool.find("near", buffer.data(), 1000)->remote, key);
}

TEST_F(MemoryPoolTest, MemoryForOneDeviceIsRegisteredByWhoeverWantsItAndKept) {
  verbs->add_device("far");
  const auto near = open();
  ASSERT_TRUE(pool.add_device(near).ok());
  ASSERT_TRUE(pool.add_device(std::move(verbs->open("far").value())).ok());
  std::byte* const memory = pool.allocate_for("near", 5000);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(pool.bytes_of(memory), 8192U);
  EXPECT_FALSE(pool.find("near", memory, 5000).has_value());
  auto with = MemoryPool::register_with(*near, {memory, pool.bytes_of(memory)});
  ASSERT_TRUE(with.ok());
  pool.attach(memory, *near, std::move(with.value()));
  EXPECT_TRUE(pool.find("near", memory, 8192).has_value());
  EXPECT_FALSE(pool.find("far", memory, 8192).has_value());

  pool.release(memory);
  EXPECT_EQ(pool.allocate_for("near", 8000), memory);
  pool.release(memory);
  ASSERT_EQ(pool.allocate(8000), memory);  // for all, so with all
  EXPECT_TRUE(pool.find("far", memory, 8192).has_value());
}

TEST_F(MemoryPoolTest, WhatADeviceHadThatIsGoneIsWithdrawn) {
  const auto device = open();
  ASSERT_TRUE(pool.add_device(device).ok());
  const MemoryPool::Withdrawal withdrawn = pool.withdrawal_of("near");
  std::byte* const memory = pool.allocate_for("near", 5000);
  ASSERT_NE(pool.allocate(5000), nullptr);
  auto late = MemoryPool::register_with(*device, {memory, 8192});
  ASSERT_TRUE(late.ok());
  pool.distrust("near");
  EXPECT_EQ(pool.take_distrusted(), std::set<std::string>{"near"});
  EXPECT_TRUE(pool.take_distrusted().empty());
  verbs->hang_freeing("near", true);
  pool.remove_device("near");
  pool.attach(memory, *device, std::move(late.value()));
  EXPECT_FALSE(pool.find("near", memory, 8192).has_value());
  EXPECT_EQ(pool.withdrawal_of("near"), nullptr);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(withdrawn->load());
  verbs->hang_freeing("near", false);
  EXPECT_TRUE(regions_become(0));
  for (int i = 0; i < 2000 && !withdrawn->load(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(withdrawn->load());

  ASSERT_TRUE(pool.add_device(open()).ok());
  EXPECT_NE(pool.withdrawal_of("near"), withdrawn);
}

TEST_F(MemoryPoolTest, BuffersThatOverlapAreRefused) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  const auto part = [this](std::size_t first, std::size_t bytes) {
    return pool.register_buffer(span().subspan(first, bytes)).ok();
  };
  ASSERT_TRUE(part(200, 100));
  EXPECT_FALSE(part(200, 50));
  EXPECT_FALSE(part(210, 50));
  EXPECT_FALSE(part(299, 50));
  EXPECT_FALSE(part(150, 51));
  EXPECT_FALSE(part(100, 500));
  EXPECT_TRUE(part(300, 50));
  EXPECT_TRUE(part(100, 100));
  EXPECT_TRUE(part(200, 100));  // once more
  EXPECT_TRUE(pool.deregister_buffer(buffer.data() + 200));
  EXPECT_TRUE(pool.deregister_buffer(buffer.data() + 200));
  EXPECT_FALSE(pool.deregister_buffer(buffer.data() + 200));
}

TEST_F(MemoryPoolTest, ADeviceThatIsGoneHoldsUpNobody) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  verbs->remove("near");
  pool.remove_device("near");
  EXPECT_TRUE(regions_become(0));
  std::vector<std::byte> other(100);
  EXPECT_TRUE(pool.register_buffer(other).ok());
  verbs->plug_in("near");
  EXPECT_TRUE(pool.add_device(open()).ok());
  EXPECT_TRUE(pool.is_registered(span()));
  EXPECT_TRUE(pool.is_registered(other));
}

TEST_F(MemoryPoolTest, ADeviceThatFreesNothingDoesNotHoldUpTheEnd) {
  auto last = std::make_unique<MemoryPool>();
  ASSERT_TRUE(last->add_device(open()).ok());
  ASSERT_NE(last->allocate(5000), nullptr);
  ASSERT_TRUE(last->register_buffer(span()).ok());
  verbs->hang_freeing("near", true);
  last.reset();
  EXPECT_EQ(verbs->shared_regions(), 2U);
  verbs->hang_freeing("near", false);
  EXPECT_TRUE(regions_become(0));
}

TEST_F(MemoryPoolTest, RevokedMemoryIsKnownAndOfNoUse) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  ASSERT_TRUE(pool.is_registered(span()));
  pool.revoke(span().subspan(10, 20));
  EXPECT_TRUE(regions_become(0));
  EXPECT_FALSE(pool.is_registered(span()));
  EXPECT_TRUE(pool.known().empty());
  EXPECT_TRUE(pool.deregister_buffer(buffer.data()));
  EXPECT_FALSE(pool.deregister_buffer(buffer.data()));
}

}  // namespace
}  // namespace r2ccl
