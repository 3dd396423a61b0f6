// The real engine over loopback rails: collectives, faults, errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>

#include "base/clock.hpp"
#include "engine/posted_channel.hpp"
#include "eventually.hpp"
#include "job.hpp"
#include "sanitized.hpp"

namespace r2ccl {
namespace {

using testing::eventually;
using testing::Job;

std::vector<float> pattern(int rank, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(rank) * 13) % 101) / 8.0F;
  return values;
}

void all_reduce_checked(Communicator& communicator, int ranks, std::size_t count,
                        Algorithm algorithm) {
  std::vector<float> data = pattern(communicator.rank(), count);
  std::vector<float> expected(count, 0.0F);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto other = pattern(rank, count);
    for (std::size_t i = 0; i < count; ++i) expected[i] += other[i];
  }
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  const Status status =
      communicator.all_reduce(bytes, bytes, count, DType::f32, ReduceOp::sum, algorithm);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(std::equal(data.begin(), data.end(), expected.begin())) << count;
}

TEST(Engine, AllReducesOfEverySizeAgree) {
  for (const int ranks : {2, 3}) {
    Job job({.ranks = ranks, .rails = 2, .shm = false, .config = {}});
    job.run([&](int, Communicator& communicator) {
      for (const std::size_t count : {0UL, 1UL, 255UL, 4096UL, 100'003UL, 1'000'000UL, 3'000'001UL})
        for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::two_shot})
          all_reduce_checked(communicator, ranks, count, algorithm);
    });
  }
}

TEST(Engine, RanksOfOneNodeUseSharedMemory) {
  Job job({.ranks = 3, .rails = 0, .shm = true, .config = {}});
  job.run([&](int, Communicator& communicator) {
    for (const std::size_t count : {0UL, 1UL, 4096UL, 1'000'001UL})
      all_reduce_checked(communicator, 3, count, Algorithm::one_shot);
  });
}

TEST(Engine, CutRailsAreReplayedAndRejoin) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  Job job({.ranks = 2, .rails = 2, .shm = false, .config = config});
  const int rounds = testing::sanitized() ? 6 : 20;
  for (int round = 0; round < rounds; ++round) {
    std::thread fault([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto rail = static_cast<RailId>(round % 2);
      EXPECT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_TRUE(job.engines[0]->inject(rail, Fault::none).ok());
    });
    job.run([&](int, Communicator& communicator) {
      for (int i = 0; i < 200; ++i)
        all_reduce_checked(communicator, 2, i % 20 == 0 ? 300'000 : 1000, Algorithm::automatic);
    });
    fault.join();
  }
}

TEST(Engine, BlackHolesAreHedged) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  config.handshake_timeout_ms = 500;
  Job job({.ranks = 2, .rails = 2, .shm = false, .config = config});
  for (int round = 0; round < 4; ++round) {
    const auto rail = static_cast<RailId>(round % 2);
    std::thread fault([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      EXPECT_TRUE(job.engines[0]->inject(rail, Fault::black_hole).ok());
    });
    job.run([&](int, Communicator& communicator) {
      for (int i = 0; i < 300; ++i)
        all_reduce_checked(communicator, 2, i % 20 == 0 ? 300'000 : 1000, Algorithm::automatic);
    });
    fault.join();
    EXPECT_TRUE(job.engines[0]->inject(rail, Fault::none).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
}

// A host without power sends no RST: its rails are silent, and acknowledge no last frame.
TEST(Engine, ACloseDoesNotWaitForASilentPeer) {
  constexpr double for_ever_s = 1e6;
  Job job({.ranks = 2, .rails = 2, .config = {}});
  job.run([](int, Communicator& communicator) {
    all_reduce_checked(communicator, 2, 1000, Algorithm::automatic);
  });
  for (RailId rail = 0; rail < 2; ++rail)
    ASSERT_TRUE(job.engines[0]->inject(rail, Fault::black_hole).ok());
  job.engines[0]->close(for_ever_s);
}

// Reads a rail's state from the journal file, like another process: no call into the engine
// refreshes the table first.
RailState told_state(const std::string& journal_path, std::size_t entry) {
  JournalRail rail{};
  std::ifstream file(journal_path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(sizeof(JournalHeader) + entry * sizeof(rail)));
  file.read(reinterpret_cast<char*>(&rail), sizeof(rail));
  EXPECT_TRUE(file.good());
  return static_cast<RailState>(rail.state);
}

TEST(Engine, TheJournalShowsALostRailAtOnce) {
  Config config;
  config.journal_dir = ::testing::TempDir();
  Job job({.ranks = 2, .rails = 8, .config = config});
  const std::string path = job.engines[0]->journal_path();
  for (RailId rail = 0; rail < 8; ++rail) {
    ASSERT_TRUE(eventually([&] { return job.engines[0]->rails()[rail].state == RailState::up; },
                           "rail " + std::to_string(rail) + " is UP"));
    ASSERT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());
    EXPECT_NE(told_state(path, rail), RailState::up) << int{rail};
  }
  for (const auto& engine : job.engines) EXPECT_EQ(std::remove(engine->journal_path().c_str()), 0);
}

TEST(Engine, LosingAllRailsForLongIsAnErrorOnEveryRank) {
  Config config;
  config.link_timeout_s = 0.3;
  Job job({.ranks = 3, .rails = 2, .shm = false, .config = config});
  for (RailId rail = 0; rail < 2; ++rail)
    EXPECT_TRUE(job.engines[0]->inject(rail, Fault::carrier_loss).ok());
  job.run([&](int, Communicator& communicator) {
    std::vector<float> data(10);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const Status status =
        communicator.all_reduce(bytes, bytes, 10, DType::f32, ReduceOp::sum, Algorithm::automatic);
    EXPECT_EQ(status.code(), ErrorCode::peer_lost) << status.message();
    EXPECT_NE(status.message().find("link_timeout_s = 0.3"), std::string::npos) << status.message();
  });
}

TEST(Engine, CallTimeoutSEndsACallInsideANode) {
  Config config;
  config.call_timeout_s = 1.0;
  Job job({.ranks = 3, .rails = 0, .shm = true, .config = config});
  std::thread second([&] {
    const Status status = job.communicators[1]->barrier();
    EXPECT_EQ(status.code(), ErrorCode::aborted) << status.message();
  });
  const Status status = job.communicators[0]->barrier();  // rank 2 never comes
  second.join();
  EXPECT_EQ(status.code(), ErrorCode::aborted);
  for (const char* words : {"has waited for call_timeout_s = 1.0", "barrier"})
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
}

TEST(Engine, AnAbortEndsTheCallOnEveryRank) {
  Config config;
  config.call_timeout_s = testing::patience_s;  // ends the test if the abort ends no call
  Job job({.ranks = 3, .rails = 2, .config = config});
  std::thread other([&] {
    EXPECT_TRUE(eventually([&] { return job.in_call(0) && job.in_call(1); },
                           "ranks 0 and 1 wait for rank 2"));
    job.communicators[0]->abort("rank 0 gave up: it is late");
  });
  // Ranks 0 and 1 wait for rank 2. Another thread aborts the call of rank 0, and rank 2 calls
  // later.
  const auto waits = [&](std::size_t rank) {
    const Status status = job.communicators[rank]->barrier();
    EXPECT_EQ(status.code(), ErrorCode::aborted) << status.message();
    EXPECT_NE(status.message().find("it is late"), std::string::npos) << status.message();
  };
  std::thread second([&] { waits(1); });
  waits(0);
  second.join();
  other.join();
  (void)job.communicators[2]->barrier();  // the data of both may arrive before the abort
  waits(2);
  job.communicators[0]->abort("rank 0 gave up: again");
  waits(0);  // with the first reason
  job.communicators[0]->close(0.0);
  job.communicators[0]->abort("rank 0 gave up: it was closed");
}

TEST(Engine, AStallBeginsWithTheCallIfRailsWereLostBefore) {
  Config config;
  config.rejoin_backoff_min_ms = 1;
  config.rejoin_backoff_max_ms = 20;
  config.flap_half_life_s = 0;
  Job job({.ranks = 2, .rails = 2, .shm = false, .config = config});
  const auto all_reduce = [](int, Communicator& communicator) {
    all_reduce_checked(communicator, 2, 1000, Algorithm::automatic);
  };
  job.run(all_reduce);
  const auto any_up = [&] {
    for (const auto& engine : job.engines)
      for (const auto& rail : engine->rails())
        if (rail.state == RailState::up || rail.state == RailState::suspect) return true;
    return false;
  };
  const auto inject_all = [&](Fault fault) {
    for (RailId rail = 0; rail < 2; ++rail) EXPECT_TRUE(job.engines[0]->inject(rail, fault).ok());
  };
  std::array<std::uint64_t, 2> before{};
  // The shorter stall of the two ranks since `before`.  A suspicion of a busy machine may have made
  // a stall of an earlier call.
  const auto shorter_stall = [&] {
    return static_cast<TimeNs>(std::min(job.engines[0]->stalled_ns() - before[0],
                                        job.engines[1]->stalled_ns() - before[1]));
  };
  // A stall without the pauses of a busy machine may be shorter than the loss, so the next loss
  // lasts longer.  A stall that begins with the return of the rails lasts a few ms.
  for (const int loss_ms : {500, 2000, 8000}) {
    inject_all(Fault::carrier_loss);
    ASSERT_TRUE(eventually([&] { return !any_up(); }, "all rails are DOWN"));
    for (const std::size_t rank : {0U, 1U}) before[rank] = job.engines[rank]->stalled_ns();
    std::thread mend([&] {
      EXPECT_TRUE(eventually([&] { return job.in_call(0) && job.in_call(1); },
                             "both ranks are in their call"));
      std::this_thread::sleep_for(std::chrono::milliseconds(loss_ms));
      inject_all(Fault::none);
    });
    job.run(all_reduce);
    mend.join();
    if (shorter_stall() >= 150 * ns_per_ms) break;
  }
  EXPECT_GE(shorter_stall(), 150 * ns_per_ms) << "late: too little CPU time in every loss";
  EXPECT_GE(std::min(job.longest_stall(0), job.longest_stall(1)), shorter_stall());
}

// Acks of earlier messages arrive on another rail while a rank waits for a lost message.
TEST(Engine, AStallIsTheWholeWaitDespiteOtherAcks) {
  Config config;
  config.ack_deadline_floor_ms = 40;  // acks are requested after 20 ms
  config.rejoin_backoff_min_ms = 1;
  config.handshake_timeout_ms = 500;
  Job job({.ranks = 2, .rails = 2, .shm = false, .config = config});
  // Whether each rank's longest call was a stall for at least 3/4 of its duration.
  const auto whole = [&](RailId rail) {
    std::array<bool, 2> was{};
    job.run([&](int rank, Communicator& communicator) {
      const auto& engine = job.engines[static_cast<std::size_t>(rank)];
      TimeNs longest = 0;
      TimeNs stall = 0;
      for (int i = 0; i < 50; ++i) {
        if (rank == 0 && i == 20) {
          for (const auto& each : job.engines)
            EXPECT_TRUE(each->inject(rail, Fault::black_hole).ok());
        }
        const auto stalled = static_cast<TimeNs>(engine->stalled_ns());
        const TimeNs began = now_ns();
        all_reduce_checked(communicator, 2, 1000, Algorithm::automatic);
        if (const TimeNs took = now_ns() - began; took > longest) {
          longest = took;
          stall = static_cast<TimeNs>(engine->stalled_ns()) - stalled;
        }
      }
      // A stall cut short by the acks would be half of the deadline.
      was[static_cast<std::size_t>(rank)] = longest >= 35 * ns_per_ms && stall >= longest * 3 / 4;
    });
    for (const auto& each : job.engines) EXPECT_TRUE(each->inject(rail, Fault::none).ok());
    const auto is_up = [](const auto& each) { return each.state == RailState::up; };
    const auto all_up = [&](const auto& engine) {
      return std::ranges::all_of(engine->rails(), is_up);
    };
    EXPECT_TRUE(
        eventually([&] { return std::ranges::all_of(job.engines, all_up); }, "all rails are UP"));
    return was[0] && was[1];
  };
  const auto short_of_cpu = [&] {
    std::uint64_t ns = 0;
    for (const auto& engine : job.engines) {
      JournalHeader header;
      std::memcpy(&header, engine->journal_bytes().data(), sizeof(header));
      ns += header.short_of_cpu_ns;
    }
    return ns;
  };
  // Small messages use a single rail, so attempts alternate between the rails. A busy machine
  // delays calls without a stall, so a single successful attempt is enough, and attempts that lack
  // CPU time prove nothing.
  constexpr int enough = 10;
  const auto ends = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  bool found = false;
  int quiet = 0;
  for (int attempt = 0; attempt < 200 && quiet < enough && !found; ++attempt) {
    if (::testing::Test::HasFailure() || std::chrono::steady_clock::now() >= ends) break;
    const std::uint64_t before = short_of_cpu();
    found = whole(static_cast<RailId>(attempt % 2));
    if (short_of_cpu() == before) ++quiet;
  }
  if (::testing::Test::HasFailure()) return;
  if (!found && quiet < enough) GTEST_SKIP() << "the machine lacked CPU time in most attempts";
  EXPECT_TRUE(found) << "late: " << quiet << " attempts, perhaps with pauses of the calls";
}

TEST(Engine, AnOrderMismatchNamesTheCallOfEachRank) {
  Job job({.ranks = 2, .rails = 1, .shm = false, .config = {}});
  job.run([&](int rank, Communicator& communicator) {
    std::vector<float> data(10);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const std::size_t count = rank == 0 ? 10 : 9;
    Status status = communicator.all_reduce(bytes, bytes, count, DType::f32, ReduceOp::sum,
                                            Algorithm::automatic);
    EXPECT_EQ(status.code(), ErrorCode::order_mismatch);
    EXPECT_NE(status.message().find("rank 0"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("10 elements"), std::string::npos) << status.message();
    status = communicator.barrier();
    EXPECT_EQ(status.code(), ErrorCode::order_mismatch);
  });
}

TEST(Engine, TwoCommunicatorsInOppositeOrderDoNotBlockEachOther) {
  Config config;
  config.slots = 1;
  config.spare_slots = 1;
  Job job({.ranks = 2, .rails = 2, .shm = false, .config = config});
  auto second = job.make_communicators(4711);
  job.run([&](int rank, Communicator& first) {
    Communicator& other = *second[static_cast<std::size_t>(rank)];
    std::thread thread([&] {
      for (int i = 0; i < 200; ++i) all_reduce_checked(other, 2, 5000, Algorithm::automatic);
    });
    for (int i = 0; i < 200; ++i) all_reduce_checked(first, 2, 3000, Algorithm::automatic);
    thread.join();
  });
}

// A thread of NCCL may connect while the process ends.
TEST(Engine, AClosedEngineTakesNoPeer) {
  const auto engine = Engine::create(Config(), 7).value();
  engine->close(0);
  PeerDescription peer;
  peer.process = 8;
  peer.label = "process 8";
  peer.rails.push_back({.kind = RailKind::tcp,
                        .name = "rail0",
                        .device = "",
                        .local_address = "127.0.0.1",
                        .remote_address = "127.0.0.1",
                        .remote_port = 1,
                        .verbs = {}});
  EXPECT_EQ(engine->add_peer(peer).code(), ErrorCode::aborted);
  auto port = engine->listen({.kind = RailKind::tcp, .device = "", .address = "127.0.0.1"});
  EXPECT_EQ(port.take_status().code(), ErrorCode::aborted);
}

TEST(Engine, AWaitForAClosedEndOfAConnectionIsAnError) {
  Job job({.ranks = 2, .rails = 2, .posted = true, .config = {}});
  const auto open_both = [&](ConnectionId id) {
    return std::pair(PostedSender::open(job.engines[0], job.engines[1]->process(), id),
                     PostedReceiver::open(job.engines[1], job.engines[0]->process(), id));
  };
  std::array<std::byte, 8> bytes{};

  auto [waits, closed] = open_both(5);
  EXPECT_TRUE(closed.value()->close(1.0).ok());
  PostedSender& sender = *waits.value();
  Status status;
  EXPECT_TRUE(eventually(
      [&] {
        status = sender.send(bytes).take_status();
        return !status.ok();
      },
      "an error of the sender"));
  EXPECT_EQ(status.code(), ErrorCode::peer_closed) << status.message();

  auto [ended, awaits] = open_both(6);
  EXPECT_TRUE(ended.value()->close(1.0).ok());
  PostedReceiver& receiver = *awaits.value();
  const MemoryId memory = receiver.add_memory(bytes).value();
  std::optional<std::uint64_t> number;
  while (!number) number = receiver.receive({.memory = memory, .bytes = 8}).value();
  EXPECT_TRUE(eventually(
      [&] {
        status = receiver.received(*number).take_status();
        return !status.ok();
      },
      "an error of the receiver"));
  EXPECT_EQ(status.code(), ErrorCode::peer_closed) << status.message();
}

// The peer may end right after its last message, and the receiver takes its messages later.
TEST(Engine, MessagesDeliveredBeforeAnErrorCanBeFinished) {
  Job job({.ranks = 2, .rails = 2, .posted = true, .config = {}});
  auto sender = std::move(PostedSender::open(job.engines[0], job.engines[1]->process(), 5).value());
  auto receiver =
      std::move(PostedReceiver::open(job.engines[1], job.engines[0]->process(), 5).value());
  std::array<std::byte, 8> source{};
  std::array<std::byte, 24> target{};
  const MemoryId memory = receiver->add_memory(target).value();
  for (std::uint64_t number = 0; number < 3; ++number) {
    std::optional<std::uint64_t> posted;
    while (!posted)
      posted = receiver->receive({.memory = memory, .offset = 8 * number, .bytes = 8}).value();
    ASSERT_EQ(*posted, number);
  }
  for (std::uint64_t number = 0; number < 2; ++number) {
    std::optional<std::uint64_t> sent;
    while (!sent) sent = sender->send(source).value();
    while (!sender->sent(*sent).value()) std::this_thread::yield();
  }
  EXPECT_TRUE(sender->close(1.0).ok());
  Status status;
  ASSERT_TRUE(eventually(
      [&] {
        status = receiver->received(2).take_status();
        return !status.ok();
      },
      "an error of the receiver"));
  for (const std::uint64_t number : {1U, 0U}) {
    auto further = receiver->receive({.memory = memory, .bytes = 8});
    ASSERT_TRUE(further.ok()) << "messages are left to finish";
    EXPECT_FALSE(further.value().has_value());
    std::optional<std::uint32_t> bytes;
    while (!bytes) bytes = receiver->received(number).value();
    EXPECT_EQ(*bytes, 8U);
  }
  EXPECT_EQ(receiver->received(2).take_status().message(), status.message());
  EXPECT_TRUE(receiver->close(1.0).ok());
}

}  // namespace
}  // namespace r2ccl
