// Rules of the stream multiplexer: order, flow control, fairness, listeners, and invalid records.
#include "streams/stream_mux.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "link_pair.hpp"

namespace r2ccl {
namespace {

using testing::bytes_of;
using testing::LinkPair;
using Kind = StreamEvent::Kind;
using Bytes = std::vector<std::byte>;

StreamMux::Options small(bool even) {
  return {.even = even,
          .window = 1000,
          .queue_bytes = 500,
          .bulk_bytes = 200,
          .copied_bytes = 100,
          .most_streams = 8};
}

// Two multiplexers, with records passed by hand.
struct Muxes {
  StreamMux a{small(false)};
  StreamMux b{small(true)};
  std::size_t room = 116;  // bytes of a record
  std::vector<RecordType> types;
  std::vector<StreamId> streams;

  std::size_t pass(StreamMux& from, StreamMux& to, std::size_t most = 1000) {
    Bytes record(room);
    std::size_t count = 0;
    for (; count < most; ++count) {
      const std::size_t bytes = from.next_record(record, /*bulk=*/true);
      if (bytes == 0) break;
      RecordHeader header;
      std::memcpy(&header, record.data(), sizeof(header));
      types.push_back(header.type);
      streams.push_back(header.stream);
      EXPECT_TRUE(to.on_record(std::span(record).first(bytes))) << to.violation();
    }
    return count;
  }
  void exchange() {
    while (pass(a, b) + pass(b, a) > 0) {
    }
  }
};

// Writes everything that fits and returns the rest.
std::span<const std::byte> write(StreamMux& mux, StreamId id, std::span<const std::byte> bytes) {
  return bytes.subspan(mux.write(id, bytes));
}

Bytes read_all(StreamMux& mux, StreamId id) {
  const auto view = mux.read(id);
  Bytes bytes(view.begin(), view.end());
  mux.consumed(id, bytes.size());
  return bytes;
}

std::vector<Kind> kinds_of(const std::vector<StreamEvent>& events) {
  std::vector<Kind> kinds;
  for (const StreamEvent& event : events) kinds.push_back(event.kind);
  return kinds;
}

TEST(StreamMux, BytesArriveInOrderAndBothEndsForgetAFinishedStream) {
  Muxes muxes;
  const StreamId id = muxes.a.open(4000);
  const Bytes sent = bytes_of(3000, 1);
  std::span<const std::byte> left(sent);
  Bytes received;
  for (int turn = 0; turn < 100 && received.size() < sent.size(); ++turn) {
    left = write(muxes.a, id, left);
    muxes.exchange();
    const Bytes more = read_all(muxes.b, id);
    received.insert(received.end(), more.begin(), more.end());
  }
  EXPECT_EQ(received, sent);
  muxes.a.finish(id);
  muxes.exchange();
  EXPECT_TRUE(muxes.b.at_end(id));
  EXPECT_EQ(muxes.b.write(id, sent), 500U);  // the other direction is still open
  muxes.b.finish(id);
  muxes.exchange();
  EXPECT_EQ(read_all(muxes.a, id), Bytes(sent.begin(), sent.begin() + 500));
  EXPECT_EQ(muxes.a.stream_count() + muxes.b.stream_count(), 0U);
}

TEST(StreamMux, FinFollowsTheQueuedBytes) {
  Muxes muxes;
  const StreamId id = muxes.a.open(4000);
  ASSERT_EQ(muxes.a.write(id, bytes_of(300, 1)), 300U);
  muxes.a.finish(id);
  EXPECT_EQ(muxes.a.write(id, bytes_of(1, 1)), 0U);
  muxes.exchange();
  EXPECT_EQ(muxes.types, (std::vector{RecordType::open, RecordType::data, RecordType::data,
                                      RecordType::data, RecordType::fin}));
  EXPECT_EQ(read_all(muxes.b, id), bytes_of(300, 1));
}

TEST(StreamMux, AReaderThatStopsHoldsUpOnlyItsOwnStream) {
  Muxes muxes;
  const StreamId stopped = muxes.a.open(1);
  const StreamId other = muxes.a.open(2);
  std::size_t written = 0;
  for (int turn = 0; turn < 20; ++turn) {
    written += muxes.a.write(stopped, bytes_of(400, turn));
    muxes.exchange();
  }
  EXPECT_EQ(written, 1500U);  // a window in flight and a queue
  EXPECT_EQ(muxes.b.read(stopped).size(), 1000U);
  ASSERT_EQ(muxes.a.write(other, bytes_of(50, 1)), 50U);
  muxes.exchange();
  EXPECT_EQ(read_all(muxes.b, other), bytes_of(50, 1));
  // The reader goes on: credit returns, and the writer is told.
  (void)muxes.a.take_events();
  (void)read_all(muxes.b, stopped);
  muxes.exchange();
  EXPECT_EQ(kinds_of(muxes.a.take_events()), std::vector{Kind::writable});
  EXPECT_EQ(muxes.b.read(stopped).size(), 500U);
  EXPECT_EQ(muxes.a.room(stopped), 500U);
}

TEST(StreamMux, StreamsTakeTurns) {
  Muxes muxes;
  const StreamId bulk = muxes.a.open(1);
  const StreamId small_one = muxes.a.open(2);
  ASSERT_EQ(muxes.a.write(bulk, bytes_of(500, 1)), 500U);
  ASSERT_EQ(muxes.a.write(small_one, bytes_of(10, 1)), 10U);
  muxes.exchange();
  EXPECT_EQ(muxes.streams, (std::vector{bulk, small_one, bulk, small_one, bulk, bulk, bulk, bulk}));
}

TEST(StreamMux, BulkWaitsWhileSmallRecordsGoOn) {
  StreamMux mux(small(false));
  const StreamId bulk = mux.open(1);
  const StreamId small_one = mux.open(2);
  Bytes record(300);
  while (mux.next_record(record, true) > 0) {
  }
  ASSERT_EQ(mux.write(bulk, bytes_of(200, 1)), 200U);
  ASSERT_EQ(mux.write(small_one, bytes_of(10, 1)), 10U);
  EXPECT_EQ(mux.next_record(record, /*bulk=*/false), sizeof(RecordHeader) + 10);
  EXPECT_EQ(mux.next_record(record, /*bulk=*/false), 0U);
  EXPECT_TRUE(mux.has_records());
  EXPECT_EQ(mux.next_record(record, /*bulk=*/true), sizeof(RecordHeader) + 200);
}

TEST(StreamMux, ResetEndsAStreamAndDropsLateRecords) {
  Muxes muxes;
  const StreamId id = muxes.a.open(1);
  muxes.exchange();
  (void)muxes.b.take_events();
  ASSERT_EQ(muxes.b.write(id, bytes_of(100, 1)), 100U);
  muxes.a.reset(id);
  EXPECT_FALSE(muxes.a.has(id));
  EXPECT_EQ(muxes.pass(muxes.b, muxes.a), 1U);  // data of B and the reset of A cross
  muxes.exchange();
  EXPECT_EQ(kinds_of(muxes.b.take_events()), std::vector{Kind::reset});
  EXPECT_TRUE(muxes.a.take_events().empty());
  EXPECT_EQ(muxes.a.stream_count() + muxes.b.stream_count(), 0U);
  EXPECT_NE(muxes.a.open(1), id);
}

TEST(StreamMux, SyncIsAnsweredAfterTheListenersBeforeIt) {
  Muxes muxes;
  muxes.a.listens(29500);
  muxes.a.listens(29501);
  muxes.a.sync(7);
  muxes.exchange();
  const auto events = muxes.b.take_events();
  ASSERT_EQ(kinds_of(events), (std::vector{Kind::listens, Kind::listens, Kind::sync}));
  EXPECT_EQ(events[0].port, 29500);
  EXPECT_EQ(events[2].token, 7U);
  muxes.b.no_mirror(29501);
  muxes.b.synced(events[2].token);
  muxes.a.unlistens(29500);
  muxes.exchange();
  const auto answers = muxes.a.take_events();
  ASSERT_EQ(kinds_of(answers), (std::vector{Kind::no_mirror, Kind::synced}));
  EXPECT_EQ(answers[0].port, 29501);
  EXPECT_EQ(kinds_of(muxes.b.take_events()), std::vector{Kind::unlistens});
}

TEST(StreamMux, StreamsBeyondTheLimitAreReset) {
  Muxes muxes;
  for (int i = 0; i < 9; ++i) (void)muxes.a.open(1);
  muxes.exchange();
  EXPECT_EQ(muxes.a.stream_count(), 8U);
  EXPECT_EQ(muxes.b.stream_count(), 8U);
  EXPECT_EQ(kinds_of(muxes.a.take_events()), std::vector{Kind::reset});
}

TEST(StreamMux, InvalidRecordsAreViolations) {
  const auto judged = [](const RecordHeader& header, std::size_t payload) {
    StreamMux mux(small(false));
    const RecordHeader open{RecordType::open, 0, 1, 2, 0, 0};
    EXPECT_TRUE(mux.on_record(std::as_bytes(std::span(&open, 1))));
    Bytes record(sizeof(header) + payload);
    std::memcpy(record.data(), &header, sizeof(header));
    const bool valid = mux.on_record(record);
    EXPECT_NE(valid, !mux.violation().empty());
    return valid;
  };
  EXPECT_TRUE(judged({RecordType::data, 0, 0, 2, 0, 1000}, 1000));
  EXPECT_FALSE(judged({RecordType::data, 0, 0, 2, 0, 1001}, 1001));  // beyond the window
  EXPECT_FALSE(judged({RecordType::data, 0, 0, 2, 0, 5}, 4));
  EXPECT_FALSE(judged({RecordType::data, 0, 0, 2, 0, 0}, 0));
  EXPECT_FALSE(judged({RecordType::data, 0, 0, 4, 0, 1}, 1));  // never opened
  EXPECT_FALSE(judged({RecordType::data, 0, 0, 1, 0, 1}, 1));
  EXPECT_FALSE(judged({RecordType::open, 0, 1, 2, 0, 0}, 0));  // opened before
  EXPECT_FALSE(judged({RecordType::open, 0, 1, 3, 0, 0}, 0));  // an id of our own
  EXPECT_FALSE(judged({RecordType::open, 0, 0, 4, 0, 0}, 0));  // no port
  EXPECT_FALSE(judged({RecordType::listens, 0, 0, 0, 0, 0}, 0));
  EXPECT_FALSE(judged({RecordType::credit, 0, 0, 2, 1, 0}, 0));  // beyond the window
  EXPECT_FALSE(judged({RecordType::fin, 1, 0, 2, 0, 0}, 0));
  EXPECT_FALSE(judged({static_cast<RecordType>(0), 0, 1, 2, 0, 0}, 0));
  EXPECT_FALSE(judged({static_cast<RecordType>(11), 0, 1, 2, 0, 0}, 0));
  StreamMux mux(small(false));
  EXPECT_FALSE(mux.on_record(Bytes(15)));
}

// ---- over a link ----

LinkOptions with_streams() {
  LinkOptions options = LinkPair::default_options();
  options.streams = {.slot_bytes = 384, .slots = 4, .spare_slots = 8};
  return options;
}

TEST(StreamMux, RecordsOverALinkSurviveTheLossOfARail) {
  LinkPair pair(2, with_streams());
  StreamMux a(small(false));
  StreamMux b(small(true));
  const StreamId id = a.open(1);
  const Bytes sent = bytes_of(4000, 3);
  std::span<const std::byte> left(sent);
  Bytes received;
  const auto step = [&](RailId rail) {
    left = write(a, id, left);
    a.pump(pair.a, pair.now);
    b.pump(pair.b, pair.now);
    pair.exchange(rail);
    ASSERT_TRUE(a.take(pair.a, pair.now));
    ASSERT_TRUE(b.take(pair.b, pair.now));
    const Bytes more = read_all(b, id);
    received.insert(received.end(), more.begin(), more.end());
    pair.pass(ns_per_ms);
  };
  for (int turn = 0; turn < 20; ++turn) step(0);
  EXPECT_FALSE(received.empty());
  EXPECT_LT(received.size(), sent.size());
  a.pump(pair.a, pair.now);
  (void)pair.pull(pair.a, 0);  // lost
  for (Link* end : {&pair.a, &pair.b}) end->rail_failed(0, 1, RailCause::carrier_loss, pair.now);
  for (int turn = 0; turn < 200 && received.size() < sent.size(); ++turn) step(1);
  EXPECT_EQ(received, sent);
}

// Both ends open streams until they are congested, then reset some: their processes have ended.
TEST(StreamMux, ManyRecordsOfBothEndsDoNotStopEachOther) {
  LinkPair pair(1, with_streams());
  StreamMux a(small(false));
  StreamMux b(small(true));
  for (StreamMux* mux : {&a, &b}) {
    std::vector<StreamId> opened;
    while (!mux->congested()) opened.push_back(mux->open(1));
    for (std::size_t i = 0; i < 100; ++i) mux->reset(opened[i]);
  }
  for (int turn = 0; turn < 10'000 && (a.has_records() || b.has_records()); ++turn) {
    a.pump(pair.a, pair.now);
    b.pump(pair.b, pair.now);
    pair.exchange(0);
    ASSERT_TRUE(a.take(pair.a, pair.now));
    ASSERT_TRUE(b.take(pair.b, pair.now));
    pair.pass(ns_per_ms);
  }
  EXPECT_FALSE(a.has_records());
  EXPECT_FALSE(b.has_records());
}

TEST(StreamMux, FewBytesOfBulkAreInTheLinkAtATime) {
  LinkOptions options = with_streams();
  options.streams.slots = 8;
  LinkPair pair(1, options);
  StreamMux mux(small(false));
  const StreamId id = mux.open(1);
  mux.pump(pair.a, pair.now);
  pair.exchange(0);
  ASSERT_EQ(mux.write(id, bytes_of(500, 1)), 500U);
  mux.pump(pair.a, pair.now);
  OutStream& out = pair.a.out_stream(streams_communicator);
  EXPECT_EQ(out.next_number(), 2U);  // one bulk record reaches the limit of 200 bytes
  EXPECT_TRUE(out.has_room());
  pair.exchange(0);
  pair.pass(10 * ns_per_ms, [&] { pair.exchange(0); });
  mux.pump(pair.a, pair.now);
  EXPECT_EQ(out.next_number(), 3U);
}

}  // namespace
}  // namespace r2ccl
