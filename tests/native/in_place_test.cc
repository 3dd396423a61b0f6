// In-place collectives overwrite memory that they have sent.  Each overwrite needs a settle() of
// the sent bytes before, and of no later message: its receiver may wait for this rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <span>
#include <vector>

#include "collectives/collectives.hpp"
#include "memory_channel.hpp"

namespace r2ccl {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int ranks = 4;
constexpr std::size_t segment = 64;

// A channel without peers: what arrives is random.  The channel keeps a checksum of every message
// sent, and compares the memory with the checksums at each operation.
class WatchfulChannel final : public Channel {
 public:
  explicit WatchfulChannel(int rank) : rank_(rank) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return ranks; }
  [[nodiscard]] std::size_t segment_bytes() const override { return segment; }

  Status send(int peer, std::span<const std::byte> data) override {
    check();
    Sent& to = of(peer);
    do {
      const auto part = data.first(std::min(data.size(), segment));
      to.bytes += part.size();
      to.messages.push_back({part, testing_world::checksum(part), to.bytes});
      data = data.subspan(part.size());
    } while (!data.empty());
    return {};
  }
  Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) override {
    check();
    Bytes& slot = of(peer).slot;
    slot.resize(bytes);
    for (std::byte& byte : slot) byte = static_cast<std::byte>(random_());
    return std::span<const std::byte>(slot);
  }
  // The algorithm may overwrite the last of the settled messages, and nothing else, until the
  // release().
  Status settle(int peer, std::size_t bytes) override {
    check();
    Sent& to = of(peer);
    const auto last = std::ranges::find(to.messages, bytes, &Message::end);
    if (last == to.messages.end()) {
      ADD_FAILURE() << "settle() ends within a message";
      return {};
    }
    EXPECT_FALSE(last->changed()) << "overwritten before settle()";
    settled_ = &*last;
    last->may_change = true;
    return {};
  }
  Status release(int peer) override {
    check();
    if (settled_ != nullptr) {
      EXPECT_TRUE(settled_->changed()) << "settle() of more than is overwritten";
      ++overwritten;
    }
    settled_ = nullptr;
    of(peer).slot.clear();
    return {};
  }
  Status finish() override {
    check();
    for (Sent& to : peers_) to.messages.clear();
    return {};
  }

  int overwritten = 0;  // messages

 private:
  struct Message {
    std::span<const std::byte> data;
    std::uint64_t sum;
    std::size_t end;  // position in the stream
    bool may_change = false;
    [[nodiscard]] bool changed() const { return testing_world::checksum(data) != sum; }
  };
  struct Sent {
    std::vector<Message> messages;
    std::size_t bytes = 0;
    Bytes slot;
  };

  Sent& of(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  void check() const {
    for (const Sent& to : peers_)
      for (const Message& message : to.messages)
        EXPECT_TRUE(message.may_change || !message.changed())
            << "rank " << rank_ << ": bytes until " << message.end << " changed before settle()";
  }

  const int rank_;
  std::mt19937 random_{7};
  std::vector<Sent> peers_ = std::vector<Sent>(ranks);
  const Message* settled_ = nullptr;
};

using Run = std::function<Status(Channel&, std::byte*, const Reducer&)>;

// Runs the call in place on each rank; returns the number of messages overwritten.
int run_in_place(std::size_t bytes, const Run& run) {
  const ReductionTree tree = ReductionTree::from_nodes(std::array{0, 1, 2, 3});
  const Reducer reducer{DType::u8, ReduceOp::sum, tree, Simd::portable};
  std::mt19937 random(11);
  int overwritten = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Bytes data(bytes);
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    WatchfulChannel channel(rank);
    EXPECT_TRUE(run(channel, data.data(), reducer).ok());
    overwritten += channel.overwritten;
  }
  return overwritten;
}

// Five blocks of four segments, in which each rank overwrites the shares of its peers.
constexpr int blocks = 5;
constexpr std::size_t input = segment * blocks * ranks;
constexpr int overwritten = blocks * ranks * (ranks - 1);

TEST(InPlace, TwoShotSettlesEachSegmentThatItOverwrites) {
  EXPECT_EQ(run_in_place(input,
                         [](Channel& channel, std::byte* data, const Reducer& reducer) {
                           return all_reduce_two_shot(channel, data, data, input, reducer);
                         }),
            overwritten);
}

TEST(InPlace, UnevenTwoShotSettlesEachSegmentThatItOverwrites) {
  const Shares shares(std::array<std::uint32_t, 4>{0, 1, 1, 2});
  EXPECT_EQ(run_in_place(input,
                         [&](Channel& channel, std::byte* data, const Reducer& reducer) {
                           return all_reduce_two_shot_uneven(channel, data, data, input, reducer,
                                                             shares);
                         }),
            overwritten);
}

}  // namespace
}  // namespace r2ccl
