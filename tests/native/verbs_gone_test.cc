// RDMA devices that are gone, or whose queue pairs are never fenced, beside new and released
// communicators.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/interrupt.hpp"
#include "verbs_test.hpp"

namespace r2ccl {
namespace {

using testing::eventually;
using testing::Job;

class VerbsGone : public testing::VerbsTest {};

// A released communicator waits for a fence inside a tick.  The thread of the tick may be in a call
// of another communicator, and a signal concerns that call.
TEST_F(VerbsGone, AReleasedCommunicatorTakesNoSignal) {
  static thread_local bool of_the_test = false;
  static std::atomic<int> asked_elsewhere{0};
  job = std::make_unique<Job>(options());
  ASSERT_TRUE(rejoined());
  auto from = job->make_part(7, {0, 1}, 0);
  const auto to = job->make_part(7, {0, 1}, 1);
  job->verbs->mute(device(0), true);
  job->verbs->hang(device(0), true);
  job->verbs->hang_freeing(device(0), true);
  of_the_test = true;
  interrupt_hook = [] {
    if (!of_the_test) ++asked_elsewhere;
    return false;
  };
  std::vector<float> data(50'000);  // copied, and in several chunks, so that both rails carry some
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  for (int message = 0; message < 8; ++message)
    ASSERT_TRUE(from->send_to(bytes, data.size(), DType::f32, 1).ok());
  for (int message = 0; message < 8; ++message)
    ASSERT_TRUE(to->receive_from(bytes, data.size(), DType::f32, 0).ok());
  from.reset();
  EXPECT_TRUE(eventually([&] { return job->group(0, 7)->closed != 0; }, "the channel is closed"));
  EXPECT_EQ(asked_elsewhere, 0);
  interrupt_hook = nullptr;
  job->verbs->hang_freeing(device(0), false);
  job->verbs->hang(device(0), false);
  job->verbs->mute(device(0), false);
  EXPECT_TRUE(rejoined());
}

TEST_F(VerbsGone, AreNotBlockedByAnotherRemovedDevice) {
  ASSERT_TRUE(rejoined());
  job->verbs->remove(device(0));
  job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::device_fatal});
  ASSERT_TRUE(lost());
  std::vector<float> data(1000);
  const auto buffer = std::as_writable_bytes(std::span(data));
  ASSERT_TRUE(job->engines[0]->register_buffer(buffer).ok());
  const auto made = job->make_communicators(999);
  job->verbs->plug_in(device(0));
  EXPECT_TRUE(rejoined());
  job->communicators = job->make_communicators(1000);
  steps(20, 3000);
}

// No event names the loss: the registration of a communicator's memory meets it first.
TEST_F(VerbsGone, AGoneDeviceDoesNotStopNewCommunicators) {
  ASSERT_TRUE(rejoined());
  job->verbs->remove(device(0));
  job->communicators = job->make_communicators(999);
  std::vector<float> data(1000);
  const Status status = job->engines[0]->register_buffer(std::as_writable_bytes(std::span(data)));
  EXPECT_TRUE(status.ok()) << status.message();
  steps(20, 3000);
  ASSERT_TRUE(lost());
  job->verbs->plug_in(device(0));
  EXPECT_TRUE(rejoined());
  steps(20, 3000);
  EXPECT_TRUE(job->engines[0]->deregister_buffer(reinterpret_cast<std::byte*>(data.data())).ok());
}

TEST_F(VerbsGone, ARemovedDeviceCanBeAddedToNewPeers) {
  ASSERT_TRUE(rejoined());
  job->verbs->remove(device(0));
  job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::device_fatal});
  ASSERT_TRUE(lost());
  PeerDescription third;
  third.process = 7;  // lower than the engine's number: the engine connects
  third.label = "rank 2";
  third.secret.resize(32, std::byte{7});
  third.rails.push_back({.kind = RailKind::verbs,
                         .name = "rail0@node0",
                         .device = "",
                         .local_address = "127.0.0.1",
                         .remote_address = "127.0.0.1",
                         .remote_port = 1,
                         .verbs = {.device = device(0), .port = 1}});
  const Status known = job->engines[0]->add_peer(third);
  EXPECT_TRUE(known.ok()) << known.message();
  third.process = 8;
  third.rails[0].verbs.device = "rdma-nobody";
  EXPECT_FALSE(job->engines[0]->add_peer(third).ok());
}

}  // namespace
}  // namespace r2ccl
