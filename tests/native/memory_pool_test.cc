// Memory that RDMA devices share.
#include "rails/verbs/memory_pool.hpp"

#include <gtest/gtest.h>

#include <chrono>
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
