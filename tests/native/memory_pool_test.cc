// Memory shared with RDMA devices.
#include "rails/verbs/memory_pool.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "drivers/fake_verbs.hpp"
#include "eventually.hpp"
#include "exported_memory.hpp"

namespace r2ccl {
namespace {

using testing::ExportedMemory;

class MemoryPoolTest : public ::testing::Test {
 protected:
  MemoryPoolTest() { verbs->add_device("near"); }
  std::shared_ptr<VerbsDevice> open() { return std::move(verbs->open("near").value()); }
  std::span<std::byte> span() { return buffer; }
  static bool is_open(int fd) { return ::fcntl(fd, F_GETFD) != -1; }
  // Waits for `count` regions, because other threads free the memory.
  ::testing::AssertionResult regions_become(std::size_t count) {
    return testing::eventually([&] { return verbs->shared_regions() == count; },
                               std::to_string(count) + " regions");
  }

  std::shared_ptr<FakeVerbs> verbs = std::make_shared<FakeVerbs>();
  std::vector<std::byte> buffer = std::vector<std::byte>(1000);
  MemoryPool pool;
};

TEST_F(MemoryPoolTest, ARegistrationMadeAheadIsUsed) {
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  const auto device = open();
  auto ahead = pool.registrations();
  MemoryPool::register_all(*device, ahead);
  ASSERT_EQ(ahead.size(), 1U);
  const std::uint32_t key = ahead[0].with->remote_key();
  ASSERT_TRUE(pool.add_device(device, std::move(ahead)).ok());
  EXPECT_EQ(pool.find("near", buffer.data(), 1000)->remote, key);
}

TEST_F(MemoryPoolTest, ARegistrationMadeAheadIsNotUsedForAnotherBuffer) {
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  const auto device = open();
  auto ahead = pool.registrations();
  MemoryPool::register_all(*device, ahead);
  const std::uint32_t key = ahead[0].with->remote_key();
  ASSERT_TRUE(pool.deregister_buffer(buffer.data()));
  ASSERT_TRUE(pool.register_buffer(span()).ok());  // perhaps on other pages
  ASSERT_TRUE(pool.add_device(device, std::move(ahead)).ok());
  EXPECT_NE(pool.find("near", buffer.data(), 1000)->remote, key);
}

TEST_F(MemoryPoolTest, MemoryForADeviceIsRegisteredByItsUserAndKept) {
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
  ASSERT_EQ(pool.allocate(8000), memory);  // for all devices, so registered with all
  EXPECT_TRUE(pool.find("far", memory, 8192).has_value());
}

TEST_F(MemoryPoolTest, MemoryOfARemovedDeviceIsWithdrawn) {
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
  EXPECT_TRUE(testing::eventually([&] { return withdrawn->load(); }, "the withdrawal"));

  ASSERT_TRUE(pool.add_device(open()).ok());
  EXPECT_NE(pool.withdrawal_of("near"), withdrawn);
}

// The device is lost, and its event has not arrived yet.
TEST_F(MemoryPoolTest, AGoneDeviceIsSkippedAndDistrusted) {
  verbs->add_device("far");
  for (const int error : {0, EIO, ENODEV, ENXIO}) {
    MemoryPool used;
    ASSERT_TRUE(used.add_device(open()).ok());
    ASSERT_TRUE(used.add_device(std::move(verbs->open("far").value())).ok());
    if (error == 0)
      verbs->remove("near");
    else
      verbs->fail_sharing("near", error);
    std::byte* const memory = used.allocate(5000);
    ASSERT_NE(memory, nullptr) << used.last_error();
    const Status status = used.register_buffer(span());
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_FALSE(used.find("near", memory, 5000).has_value());
    EXPECT_TRUE(used.find("far", memory, 5000).has_value());
    EXPECT_TRUE(used.find("far", buffer.data(), 1000).has_value());
    EXPECT_EQ(used.take_distrusted(), std::set<std::string>{"near"});
    verbs->plug_in("near");
    verbs->fail_sharing("near", 0);
  }
}

TEST_F(MemoryPoolTest, APresentDeviceThatRefusesMemoryIsAnError) {
  verbs->add_device("far");
  ASSERT_TRUE(pool.add_device(open()).ok());
  ASSERT_TRUE(pool.add_device(std::move(verbs->open("far").value())).ok());
  verbs->fail_sharing("near", ENOMEM);
  EXPECT_EQ(pool.allocate(5000), nullptr);
  EXPECT_NE(pool.last_error().find("registering"), std::string::npos) << pool.last_error();
  EXPECT_FALSE(pool.register_buffer(span()).ok());
  EXPECT_TRUE(pool.take_distrusted().empty());
}

TEST_F(MemoryPoolTest, OverlappingBuffersAreRefused) {
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
  EXPECT_TRUE(part(200, 100));  // a second registration
  EXPECT_TRUE(pool.deregister_buffer(buffer.data() + 200));
  EXPECT_TRUE(pool.deregister_buffer(buffer.data() + 200));
  EXPECT_FALSE(pool.deregister_buffer(buffer.data() + 200));
}

TEST_F(MemoryPoolTest, ARemovedDeviceDoesNotBlockOtherCalls) {
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

TEST_F(MemoryPoolTest, ADeviceThatFreesNothingDoesNotBlockDestruction) {
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

TEST_F(MemoryPoolTest, RevokedMemoryIsKnownButUnusable) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  ASSERT_TRUE(pool.is_registered(span()));
  pool.revoke(span().subspan(10, 20));
  EXPECT_TRUE(regions_become(0));
  EXPECT_FALSE(pool.is_registered(span()));
  EXPECT_TRUE(pool.registrations().empty());
  EXPECT_TRUE(pool.deregister_buffer(buffer.data()));
  EXPECT_FALSE(pool.deregister_buffer(buffer.data()));
}

TEST_F(MemoryPoolTest, ADmaBufIsRegisteredWithEveryDeviceUntilDeregistered) {
  verbs->add_device("far");
  for (const char* name : {"near", "far"})
    ASSERT_TRUE(pool.add_device(std::move(verbs->open(name).value())).ok());
  ExportedMemory gpu(1 << 16);
  const std::span all = gpu.addresses();
  FileDescriptor dma_buf = gpu.dma_buf();
  const int fd = dma_buf.get();
  ASSERT_TRUE(pool.register_dma_buf(all, std::move(dma_buf)).ok());
  EXPECT_TRUE(pool.is_registered(all.subspan(100, 5000)));
  EXPECT_NE(pool.find("near", all.data(), 1)->remote, pool.find("far", all.data(), 1)->remote);
  EXPECT_EQ(pool.registered_bytes(), all.size());
  EXPECT_TRUE(is_open(fd));

  ASSERT_TRUE(pool.register_dma_buf(all, gpu.dma_buf()).ok());  // a second registration
  EXPECT_EQ(verbs->shared_regions(), 2U);
  EXPECT_TRUE(pool.deregister_buffer(all.data()));
  EXPECT_TRUE(pool.is_registered(all));
  EXPECT_TRUE(pool.deregister_buffer(all.data()));
  EXPECT_FALSE(pool.deregister_buffer(all.data()));
  EXPECT_FALSE(pool.is_registered(all));
  EXPECT_FALSE(is_open(fd));
  EXPECT_EQ(verbs->shared_regions(), 0U);
  EXPECT_EQ(pool.registered_bytes(), 0U);
}

TEST_F(MemoryPoolTest, ADmaBufRefusedByADeviceIsRegisteredWithNone) {
  ExportedMemory gpu(1 << 16);
  EXPECT_NE(pool.register_dma_buf(gpu.addresses(), gpu.dma_buf()).message().find("no RDMA device"),
            std::string::npos);
  verbs->add_device("far");
  for (const char* name : {"near", "far"})
    ASSERT_TRUE(pool.add_device(std::move(verbs->open(name).value())).ok());
  for (const char* name : {"near", "far"}) {
    verbs->refuse_dma_bufs(name, EOPNOTSUPP);
    const Status status = pool.register_dma_buf(gpu.addresses(), gpu.dma_buf());
    EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
    EXPECT_EQ(verbs->shared_regions(), 0U);
    EXPECT_TRUE(pool.registrations().empty());
    EXPECT_FALSE(pool.deregister_buffer(gpu.addresses().data()));
    verbs->refuse_dma_bufs(name, 0);
  }
  EXPECT_FALSE(pool.register_dma_buf(gpu.addresses(), FileDescriptor()).ok());
  EXPECT_FALSE(pool.register_dma_buf({}, gpu.dma_buf()).ok());
  EXPECT_TRUE(pool.register_dma_buf(gpu.addresses(), gpu.dma_buf()).ok());
}

TEST_F(MemoryPoolTest, OverlappingDmaBufsAreRefused) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  ExportedMemory gpu(1 << 16);
  const std::span all = gpu.addresses();
  ASSERT_TRUE(pool.register_dma_buf(all.subspan(8192, 8192), gpu.dma_buf()).ok());
  EXPECT_FALSE(pool.register_dma_buf(all, gpu.dma_buf()).ok());
  EXPECT_FALSE(pool.register_dma_buf(all.subspan(12288, 8192), gpu.dma_buf()).ok());
  EXPECT_FALSE(pool.register_dma_buf(all.subspan(8192, 4096), gpu.dma_buf()).ok());
  EXPECT_FALSE(pool.register_buffer(all.subspan(8192, 8192)).ok());
  EXPECT_TRUE(pool.register_buffer(all.subspan(16384, 8192)).ok());
  EXPECT_FALSE(pool.register_dma_buf(all.subspan(16384, 8192), gpu.dma_buf()).ok());
  EXPECT_TRUE(pool.register_dma_buf(all.first(8192), gpu.dma_buf()).ok());
}

TEST_F(MemoryPoolTest, ALaterDeviceMayRefuseDmaBufs) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  ExportedMemory gpu(1 << 16);
  const std::span all = gpu.addresses();
  ASSERT_TRUE(pool.register_dma_buf(all, gpu.dma_buf()).ok());
  ASSERT_TRUE(pool.register_buffer(span()).ok());
  for (const char* name : {"later", "last"}) verbs->add_device(name);
  ASSERT_TRUE(pool.add_device(std::move(verbs->open("last").value())).ok());
  EXPECT_TRUE(pool.is_registered(all));

  verbs->refuse_dma_bufs("later", EOPNOTSUPP);
  std::shared_ptr<VerbsDevice> later = std::move(verbs->open("later").value());
  auto ahead = pool.registrations();
  MemoryPool::register_all(*later, ahead);
  ASSERT_TRUE(pool.add_device(later, std::move(ahead)).ok());
  EXPECT_FALSE(pool.find("later", all.data(), 1).has_value());
  EXPECT_TRUE(pool.find("last", all.data(), all.size()).has_value());
  EXPECT_TRUE(pool.is_registered(all));  // rails of other devices stay usable
  EXPECT_TRUE(pool.is_registered(span()));

  EXPECT_FALSE(pool.register_dma_buf(all, gpu.dma_buf()).ok());  // `later` refuses
  verbs->refuse_dma_bufs("later", 0);
  EXPECT_TRUE(pool.register_dma_buf(all, gpu.dma_buf()).ok());
  EXPECT_TRUE(pool.is_registered(all));
}

TEST_F(MemoryPoolTest, ADmaBufStaysOpenForRegistrationAhead) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  ExportedMemory gpu(1 << 16);
  FileDescriptor dma_buf = gpu.dma_buf();
  const int fd = dma_buf.get();
  ASSERT_TRUE(pool.register_dma_buf(gpu.addresses(), std::move(dma_buf)).ok());
  verbs->remove("near");
  pool.remove_device("near");
  EXPECT_TRUE(regions_become(0));
  verbs->plug_in("near");
  const auto back = open();
  auto ahead = pool.registrations();
  ASSERT_TRUE(pool.deregister_buffer(gpu.addresses().data()));
  EXPECT_TRUE(is_open(fd));
  std::thread([&] { MemoryPool::register_all(*back, ahead); }).join();
  EXPECT_EQ(verbs->shared_regions(), 1U);
  ASSERT_TRUE(pool.add_device(back, std::move(ahead)).ok());
  EXPECT_EQ(verbs->shared_regions(), 0U);
  EXPECT_FALSE(pool.is_registered(gpu.addresses()));
  EXPECT_FALSE(is_open(fd));
}

TEST_F(MemoryPoolTest, ARevokedDmaBufIsKnownButUnusable) {
  ASSERT_TRUE(pool.add_device(open()).ok());
  ExportedMemory gpu(1 << 16);
  ASSERT_TRUE(pool.register_dma_buf(gpu.addresses(), gpu.dma_buf()).ok());
  pool.revoke(gpu.addresses().subspan(10, 20));
  EXPECT_TRUE(regions_become(0));
  EXPECT_FALSE(pool.is_registered(gpu.addresses()));
  EXPECT_TRUE(pool.registrations().empty());
  EXPECT_TRUE(pool.deregister_buffer(gpu.addresses().data()));
}

}  // namespace
}  // namespace r2ccl
