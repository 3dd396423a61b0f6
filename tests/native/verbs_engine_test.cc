// The real engine over fake RDMA devices.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "verbs_test.hpp"

namespace r2ccl {
namespace {

using testing::eventually;
using testing::Job;

class Verbs : public testing::VerbsTest {};

TEST_F(Verbs, CarryEverySize) {
  ASSERT_TRUE(rejoined());
  const auto before = epochs();
  for (const std::size_t floats : {1U, 100U, 1000U, 1003U, 1100U, 8000U, 40000U, 300000U})
    steps(5, floats);
  for (const int rail : {0, 1}) {
    EXPECT_EQ(info(0, rail).kind, RailKind::verbs);
    EXPECT_GT(job->verbs->writes(device(0, rail)), 0U);
  }
  EXPECT_EQ(epochs(), before) << "a rail went down for nothing";
  EXPECT_EQ(info(0, 0).device, device(0) + ":1");
  EXPECT_GT(info(0, 0).round_trip, 0);
}

TEST_F(Verbs, CarryDataUnderDelayedAndReorderedWrites) {
  ASSERT_TRUE(rejoined());
  std::mt19937 random(7);
  job->verbs->shuffle(7);
  std::atomic<bool> over{false};
  std::thread delaying([&] {
    while (!over) {
      job->verbs->hold();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      job->verbs->let_go();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
    }
  });
  for (const std::size_t floats : {10U, 1000U, 8000U, 300000U}) steps(20, floats);
  over = true;
  delaying.join();
  steps(20, 1000);
}

TEST_F(Verbs, GoDownOnAPortError) {
  expect_failover(
      [&] { job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::port_error, .port = 1}); },
      RailCause::carrier_loss);
}

TEST_F(Verbs, StayUpOnErrorsOfAnotherPort) {
  ASSERT_TRUE(rejoined());
  const auto before = epochs();
  const auto event = [&](VerbsEvent::Kind kind, std::uint8_t port, std::uint32_t pair) {
    job->verbs->post_event(device(0), {.kind = kind, .port = port, .queue_pair = pair});
  };
  steps(40, 3000, [&](int step) {
    if (step != 10) return;
    event(VerbsEvent::Kind::port_error, 2, 0);
    event(VerbsEvent::Kind::queue_pair_fatal, 0, 9999);
    event(VerbsEvent::Kind::completion_queue_error, 0, 9999);
    event(VerbsEvent::Kind::gid_changed, 2, 0);
    event(VerbsEvent::Kind::gid_changed, 1, 0);  // the GID is unchanged
    event(VerbsEvent::Kind::other, 1, 0);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(epochs(), before);
}

TEST_F(Verbs, ReconnectWhenTheirGidChanges) {
  expect_failover(
      [&] {
        job->verbs->set_gid(device(0), 3, std::byte{77});
        job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::gid_changed, .port = 1});
      },
      RailCause::address_loss);
}

TEST_F(Verbs, ContinueWhileAPortQueryHangs) {
  ASSERT_TRUE(rejoined());
  const Epoch epoch = info(0, 0).epoch;
  const auto ask = [&] {
    job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::gid_changed, .port = 1});
  };
  job->verbs->hang_ports(device(0), true);
  steps(40, 3000, [&](int step) {
    if (step == 10) ask();
  });
  EXPECT_EQ(info(0, 0).epoch, epoch);
  job->verbs->set_gid(device(0), 3, std::byte{77});
  ask();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until the event is processed
  job->verbs->hang_ports(device(0), false);
  EXPECT_TRUE(eventually([&] { return saw(RailCause::address_loss, 0) && all_up(); },
                         "the loss of the address and the rejoin of the rail"));
  steps(10, 3000);
}

TEST_F(Verbs, GoDownOnACompletionQueueOverrun) {
  expect_failover(
      [&] {
        job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::completion_queue_error,
                                           .queue_pair = job->verbs->queue_pair_of(device(0))});
      },
      RailCause::device_loss);
}

TEST_F(Verbs, GoDownOnAQueuePairError) {
  expect_failover(
      [&] {
        job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::queue_pair_fatal,
                                           .queue_pair = job->verbs->queue_pair_of(device(0))});
      },
      RailCause::device_loss);
}

TEST_F(Verbs, GoDownOnAnUnexpectedCompletion) {
  expect_failover([&] { job->verbs->inject_completion(device(0), {.id = 4444444, .ok = true}); },
                  RailCause::completion_error);
}

TEST_F(Verbs, GoDownOnAFlushAfterSuccess) {
  expect_failover([&] { job->verbs->flush_newest(device(0)); }, RailCause::completion_error);
}

TEST_F(Verbs, GoDownWhenRetriesAreExhausted) {
  Config with = config();
  with.dead_deadline_ms = 60'000;  // the silence of the muted device is not the cause
  job = std::make_unique<Job>(options(2, 2, with));
  expect_failover([&] { job->verbs->mute(device(0), true); }, RailCause::completion_error,
                  [&] {
                    EXPECT_TRUE(eventually([&] { return job->verbs->exhaust_retries(device(0)); },
                                           "a pending write"));
                    job->verbs->mute(device(0), false);
                  });
}

TEST_F(Verbs, GoDownWhenAPostFails) {
  expect_failover([&] { job->verbs->fail_posts(device(0), ENOMEM); }, RailCause::device_loss,
                  [&] {
                    EXPECT_TRUE(eventually([&] { return saw(RailCause::device_loss, 0); },
                                           "the loss of the rail"));
                    job->verbs->fail_posts(device(0), 0);
                  });
}

TEST_F(Verbs, GoDownInABlackHoleAndRejoin) {
  // A busy machine observes less silence than passes, so the hole lasts until the rail is DOWN.
  expect_failover(
      [&] { job->verbs->mute(device(0), true); }, RailCause::dead_deadline,
      [&] {
        EXPECT_TRUE(
            eventually([&] { return saw(RailCause::dead_deadline, 0); }, "the loss of the rail"));
        std::this_thread::sleep_for(std::chrono::milliseconds(500));  // attempts to rejoin fail
        job->verbs->mute(device(0), false);
      });
}

TEST_F(Verbs, RejoinAfterTheirDeviceWasRemovedAndPluggedIn) {
  expect_failover(
      [&] {
        job->verbs->remove(device(0));
        job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::device_fatal});
      },
      RailCause::device_loss,
      [&] {
        EXPECT_TRUE(
            eventually([&] { return saw(RailCause::device_loss, 0); }, "the loss of the rail"));
        std::this_thread::sleep_for(std::chrono::milliseconds(300));  // attempts to rejoin fail
        job->verbs->plug_in(device(0));
      });
}

TEST_F(Verbs, AreNotReusedWhileAFenceHangs) {
  ASSERT_TRUE(rejoined());
  const Epoch epoch = info(0, 0).epoch;
  job->verbs->hang(device(0), true);
  job->verbs->hang_freeing(device(0), true);  // memory cannot be withdrawn, either
  steps(200, 3000, [&](int step) {
    if (step == 20)
      job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::port_error, .port = 1});
  });
  EXPECT_TRUE(eventually([&] { return info(0, 0).state == RailState::down; }, "the rail is DOWN"));
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // longer than any patience
  EXPECT_NE(info(0, 0).state, RailState::up);
  EXPECT_EQ(info(0, 0).epoch, epoch);
  job->verbs->hang_freeing(device(0), false);
  job->verbs->hang(device(0), false);
  EXPECT_TRUE(rejoined());
  steps(20, 3000);
}

TEST_F(Verbs, RejoinWithoutAFenceOnceTheirMemoryIsWithdrawn) {
  ASSERT_TRUE(rejoined());
  const Epoch epoch = info(0, 0).epoch;
  job->verbs->hang(device(0), true);
  steps(60, 3000, [&](int step) {
    if (step == 20)
      job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::port_error, .port = 1});
  });
  EXPECT_TRUE(
      eventually([&] { return info(0, 0).epoch > epoch && all_up(); }, "the rejoin of the rail"));
  expect_kept_down();
  steps(60, 3000);
  job->verbs->hang(device(0), false);
}

TEST_F(Verbs, GoDownWhenTheirDeviceFailsSilently) {
  ASSERT_TRUE(rejoined());
  job->verbs->remove(device(0));
  steps(60, 3000);
  EXPECT_TRUE(lost());
  job->verbs->plug_in(device(0));
  EXPECT_TRUE(rejoined());
  steps(20, 3000);
}

// Queue pairs of a removed device cannot be destroyed before the device_fatal event.
TEST_F(Verbs, AreDestroyedOnALateDeviceFatalEvent) {
  ASSERT_TRUE(rejoined());
  job->verbs->hang_freeing(device(0), true);
  job->verbs->remove(device(0));
  steps(60, 3000);
  EXPECT_TRUE(eventually([&] { return logged(0, "all memory is withdrawn from it"); },
                         "the withdrawal of all memory in the log"));
  EXPECT_GT(job->verbs->queue_pairs_of(device(0)), 0U);
  job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::device_fatal});
  EXPECT_TRUE(eventually([&] { return job->verbs->queue_pairs_of(device(0)) == 0; },
                         "the queue pairs are destroyed"));
  job->verbs->hang_freeing(device(0), false);
  job->verbs->plug_in(device(0));
  EXPECT_TRUE(rejoined());
  steps(20, 3000);
}

TEST_F(Verbs, UseTheConfiguredOptions) {
  Config with = config();
  with.verbs_timeout = 15;
  with.verbs_retry_count = 5;
  with.verbs_rnr_timer = 9;
  with.verbs_rnr_retry = 3;
  with.traffic_class = 104;
  with.service_level = 3;
  with.pkey_index = 2;
  job = std::make_unique<Job>(options(2, 2, with));
  ASSERT_TRUE(rejoined());
  steps(5, 3000);
  const auto made = job->verbs->newest_of(device(0));
  EXPECT_EQ(made.path.port, 1);
  EXPECT_EQ(made.path.gid_index, 1);
  EXPECT_EQ(made.path.timeout, 15);
  EXPECT_EQ(made.path.retry_count, 5);
  EXPECT_EQ(made.path.rnr_timer, 9);
  EXPECT_EQ(made.path.rnr_retry, 3);
  EXPECT_EQ(made.path.traffic_class, 104);
  EXPECT_EQ(made.path.service_level, 3);
  EXPECT_EQ(made.pkey_index, 2);
  EXPECT_EQ(made.own.mtu, 4096U);
}

TEST_F(Verbs, ReadACallersRegisteredMemoryDirectly) {
  constexpr std::size_t floats = 200000;  // a message too large for staging
  std::array<std::vector<float>, 2> data{std::vector<float>(floats), std::vector<float>(floats)};
  for (const std::size_t rank : {0U, 1U}) {
    std::iota(data[rank].begin(), data[rank].end(), static_cast<float>(rank));
    const Status status =
        job->engines[rank]->register_buffer(std::as_writable_bytes(std::span(data[rank])));
    ASSERT_TRUE(status.ok()) << status.message();
  }
  job->run([&](int rank, Communicator& communicator) {
    auto* bytes = reinterpret_cast<std::byte*>(data[static_cast<std::size_t>(rank)].data());
    for (int step = 0; step < 10; ++step) {
      const Status status = communicator.all_reduce(bytes, bytes, floats, DType::f32, ReduceOp::max,
                                                    Algorithm::automatic);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  });
  for (std::size_t i = 0; i < floats; ++i) ASSERT_EQ(data[0][i], static_cast<float>(i + 1));
  EXPECT_FALSE(job->engines[0]->register_buffer({}).ok());
  for (const std::size_t rank : {0U, 1U}) {
    auto* bytes = reinterpret_cast<const std::byte*>(data[rank].data());
    EXPECT_TRUE(job->engines[rank]->deregister_buffer(bytes).ok());
    EXPECT_FALSE(job->engines[rank]->deregister_buffer(bytes).ok());
  }
}

TEST_F(Verbs, WriteResultsIntoACallersRegisteredMemory) {
  constexpr std::size_t floats = 3'000'000;  // exceeds the capacity of the slots
  std::array<std::vector<float>, 2> in{std::vector<float>(floats, 1),
                                       std::vector<float>(floats, 2)};
  std::array<std::vector<float>, 2> out{std::vector<float>(floats), std::vector<float>(floats)};
  for (const std::size_t rank : {0U, 1U})
    ASSERT_TRUE(
        job->engines[rank]->register_buffer(std::as_writable_bytes(std::span(out[rank]))).ok());
  const auto all_reduce = [&](int rank, Communicator& communicator) {
    const auto own = static_cast<std::size_t>(rank);
    const Status status = communicator.all_reduce(
        reinterpret_cast<std::byte*>(in[own].data()), reinterpret_cast<std::byte*>(out[own].data()),
        floats, DType::f32, ReduceOp::sum, Algorithm::two_shot);
    ASSERT_TRUE(status.ok()) << status.message();
  };
  // The peer's half is written; on a busy machine, hedged chunks come in slots instead.
  constexpr std::size_t half = floats * sizeof(float) / 2;
  std::array<bool, 2> direct{};
  for (std::size_t runs = 1; runs <= 10 && !(direct[0] && direct[1]); ++runs) {
    const std::array before{job->verbs->written(out[0].data()), job->verbs->written(out[1].data())};
    job->run(all_reduce);
    for (const std::size_t rank : {0U, 1U}) {
      for (std::size_t i = 0; i < floats; ++i) ASSERT_EQ(out[rank][i], 3.0F) << i;
      const std::size_t written = job->verbs->written(out[rank].data()) - before[rank];
      EXPECT_LE(written, half);
      direct[rank] = direct[rank] || written >= half / 4;
    }
  }
  EXPECT_TRUE(direct[0] && direct[1]) << "late: hedged chunks in every run";

  // A rail is lost during the call.
  for (auto& result : out) std::fill(result.begin(), result.end(), 0.0F);
  job->run([&](int rank, Communicator& communicator) {
    if (rank == 0) job->verbs->mute(device(0), true);
    all_reduce(rank, communicator);
    if (rank == 0) job->verbs->mute(device(0), false);
  });
  for (const auto& result : out)
    for (std::size_t i = 0; i < floats; ++i) ASSERT_EQ(result[i], 3.0F) << i;
  EXPECT_TRUE(rejoined());
}

TEST_F(Verbs, KeepMemoryThatADeviceMayStillRead) {
  constexpr std::size_t floats = 2'000'000;  // more than a rail takes at once
  // A stall without the pauses of a busy machine may be shorter than the wait, so the next wait
  // lasts longer.
  for (const int hold_ms : {200, 1000, 5000}) {
    job = std::make_unique<Job>(options());
    std::vector<float> data(floats, 1.0F);
    ASSERT_TRUE(job->engines[0]->register_buffer(std::as_writable_bytes(std::span(data))).ok());
    ASSERT_TRUE(rejoined());
    job->verbs->mute_at(device(0), std::as_bytes(std::span(data)));
    job->verbs->hang(device(0), true);          // its queue pairs are not fenced
    job->verbs->hang_freeing(device(0), true);  // memory cannot be withdrawn, either
    std::atomic<bool> returned{false};
    std::thread sending([&] {
      const Status status = job->communicators[0]->send_to(
          reinterpret_cast<const std::byte*>(data.data()), floats, DType::f32, 1);
      EXPECT_TRUE(status.ok()) << status.message();
      returned = true;
    });
    std::vector<float> received(floats);
    const Status status = job->communicators[1]->receive_from(
        reinterpret_cast<std::byte*>(received.data()), floats, DType::f32, 0);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(received, data);
    std::this_thread::sleep_for(std::chrono::milliseconds(hold_ms));
    EXPECT_FALSE(returned);
    job->verbs->hang_freeing(device(0), false);
    job->verbs->hang(device(0), false);
    sending.join();
    job->verbs->mute_at(device(0), {});
    job->verbs->mute(device(0), false);
    EXPECT_TRUE(rejoined());
    if (job->longest_stall(0) >= 200 * ns_per_ms) break;
  }
  EXPECT_GE(job->longest_stall(0), 200 * ns_per_ms) << "late: too little CPU time in every wait";
}

TEST_F(Verbs, AreNotReusedWhileAQueuePairCannotBeDestroyed) {
  ASSERT_TRUE(rejoined());
  job->verbs->refuse_destroy(device(0), true);
  steps(200, 3000, [&](int step) {
    if (step == 20)
      job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::port_error, .port = 1});
  });
  expect_kept_down();
  job->verbs->refuse_destroy(device(0), false);
  EXPECT_TRUE(rejoined());
}

TEST_F(Verbs, DoNotPileUpOnAHangingDevice) {
  ASSERT_TRUE(rejoined());
  job->verbs->set_port_active(device(0), false);
  job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::port_error, .port = 1});
  ASSERT_TRUE(
      eventually([&] { return info(0, 0).state == RailState::connecting; }, "the rail connects"));
  job->verbs->hang(device(0), true);
  // Tens of attempts.  Later, a hanging device is opened again.
  std::size_t most = 0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (;;) {
    const std::size_t pairs = job->verbs->queue_pairs_of(device(0));
    if (std::chrono::steady_clock::now() >= until) break;
    most = std::max(most, pairs);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LE(most, 12U);
  job->verbs->hang(device(0), false);
  job->verbs->set_port_active(device(0), true);
  EXPECT_TRUE(rejoined());
}

TEST_F(Verbs, ReleaseTheMemoryOfClosedCommunicators) {
  ASSERT_TRUE(rejoined());  // a rail that comes up has memory of its own
  const auto round = [this](std::uint64_t id) {
    const auto made = job->make_communicators(id);
    std::vector<std::thread> threads;
    for (const auto& communicator : made)
      threads.emplace_back([&communicator] {
        std::vector<float> data(50000, 1.0F);
        auto* bytes = reinterpret_cast<std::byte*>(data.data());
        for (int step = 0; step < 3; ++step)
          ASSERT_TRUE(communicator
                          ->all_reduce(bytes, bytes, data.size(), DType::f32, ReduceOp::max,
                                       Algorithm::automatic)
                          .ok());
        communicator->close(5.0);
      });
    for (std::thread& thread : threads) thread.join();
  };
  for (std::uint64_t id = 1; id <= 10; ++id) round(id);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const std::size_t regions = job->verbs->shared_regions();
  for (std::uint64_t id = 11; id <= 40; ++id) round(id);
  // Other threads free the memory.
  EXPECT_TRUE(eventually([&] { return job->verbs->shared_regions() <= regions + 4; },
                         "the memory of closed communicators is released"));
}

TEST_F(Verbs, FailOverToTcpAndBack) {
  job = std::make_unique<Job>(options(3, 2));
  ASSERT_TRUE(rejoined());
  steps(30, 300000);
  const std::uint64_t over_tcp = info(0, 2).counters.data_tx_bytes;
  for (const int rail : {0, 1}) {
    job->verbs->set_port_active(device(0, rail), false);
    job->verbs->post_event(device(0, rail), {.kind = VerbsEvent::Kind::port_error, .port = 1});
  }
  steps(30, 30000);
  for (const int rail : {0, 1})
    EXPECT_TRUE(eventually([&] { return info(0, rail).state != RailState::up; },
                           "rail " + std::to_string(rail) + " is not UP"));
  steps(5, 30000);
  EXPECT_GT(info(0, 2).counters.data_tx_bytes, over_tcp);
  for (const int rail : {0, 1}) {
    job->verbs->set_port_active(device(0, rail), true);
    job->verbs->post_event(device(0, rail), {.kind = VerbsEvent::Kind::port_active, .port = 1});
  }
  ASSERT_TRUE(rejoined());
  const std::uint64_t before = info(0, 0).counters.data_tx_bytes;
  steps(30, 300000);
  EXPECT_GT(info(0, 0).counters.data_tx_bytes, before);
}

TEST_F(Verbs, AnnounceAGracefulClose) {
  ASSERT_TRUE(rejoined());
  Status status;
  std::thread waiting([&] {
    std::vector<float> data(10);
    status = job->communicators[1]->receive_from(reinterpret_cast<std::byte*>(data.data()),
                                                 data.size(), DType::f32, 0);
  });
  EXPECT_TRUE(eventually([&] { return job->in_call(1); }, "rank 1 is in its call"));
  job->communicators[0]->close(1.0);
  job->engines[0]->close(1.0);
  waiting.join();
  EXPECT_EQ(status.code(), ErrorCode::peer_closed) << status.message();
}

TEST_F(Verbs, UnusableDevicesAreAnError) {
  job->verbs->add_device("rdma-short");
  job->verbs->fail_sharing("rdma-short", ENOMEM);
  for (const std::string& name : {std::string("rdma-nobody"), std::string("rdma-short")}) {
    const Status status = job->engines[0]->open_verbs({name, 1});
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
  }
  EXPECT_FALSE(job->engines[0]->open_verbs({device(0), 2}).ok()) << "there is no port 2";
  Config with = config();
  with.pkey_index = FakeVerbs::pkeys;
  job = std::make_unique<Job>(options(1, 0, with));
  job->verbs->add_device(device(0));
  const Status status = job->engines[0]->open_verbs({device(0), 1});
  EXPECT_NE(status.message().find("R2CCL_PKEY_INDEX"), std::string::npos) << status.message();
}

// Eight ranks of a node, each with a NIC of its own.  The round trip of an idle device may look
// long on a busy machine, until a later probe.
TEST_F(Verbs, SmallMessagesOfEightRanksUseEightRails) {
  constexpr int count = 8;
  const auto busiest = [this](const std::vector<Engine::RailInfo>& before) {
    const auto now = job->engines[0]->rails();
    std::vector<std::uint64_t> bytes;
    for (std::size_t rail = 0; rail < now.size(); ++rail)
      bytes.push_back(now[rail].counters.data_tx_bytes - before[rail].counters.data_tx_bytes);
    return static_cast<int>(std::ranges::max_element(bytes) - bytes.begin());
  };
  for (int own = 0; own < count; ++own) {
    Job::Options with = options(count, count);
    with.distance = [own](int rail) {
      return static_cast<std::uint8_t>((rail + count - own) % count);
    };
    job = std::make_unique<Job>(with);
    ASSERT_TRUE(rejoined());
    const auto nearest_is_used = [&] {
      const auto before = job->engines[0]->rails();
      steps(20, 100);
      return busiest(before) == own;
    };
    EXPECT_TRUE(eventually(nearest_is_used, "small messages use rail " + std::to_string(own)));
  }
}

// Holds the writes of an ended epoch in device 0. The fence must keep them away from reused slots.
TEST_F(Verbs, KeepLateWritesAwayFromReusedSlots) {
  ASSERT_TRUE(rejoined());
  job->verbs->mute(device(0), true);
  job->run([&](int rank, Communicator& communicator) {
    std::vector<float> data(40000, static_cast<float>(rank));
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const Status status = communicator.all_reduce(bytes, bytes, data.size(), DType::f32,
                                                  ReduceOp::max, Algorithm::automatic);
    ASSERT_TRUE(status.ok()) << status.message();
  });
  // The queue pair of the first attempts is destroyed before any slot is reused.
  job->verbs->post_event(device(0), {.kind = VerbsEvent::Kind::port_error, .port = 1});
  ASSERT_TRUE(eventually([&] { return entered(RailState::down) != 0; }, "the rail went down"));
  ASSERT_TRUE(
      eventually([&] { return info(0, 0).state != RailState::down; }, "the rail is not DOWN"));
  EXPECT_TRUE(eventually([&] { return job->verbs->queue_pairs() <= 4U; },
                         "no more queue pairs than ends of rails"));
  job->verbs->mute(device(0), false);
  steps(40, 40000);
}

}  // namespace
}  // namespace r2ccl
