// Channel for tests of collective algorithms in a single process: threads are ranks, queues are
// streams.
//
// The channel is as lazy as its contract allows.  It copies bytes from the sender's memory only
// when the receiver asks for them, and compares them with a checksum taken at send time.  An
// algorithm that overwrites its memory too early fails whatever the timing, and sanitizers see the
// race.  Even delivery does not release memory, because a replay may still read it: unsettled
// memory must be unchanged at the end.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collectives/channel.hpp"

namespace r2ccl::testing_world {

inline std::uint64_t checksum(std::span<const std::byte> data) {
  std::uint64_t hash = 14695981039346656037u;
  for (const std::byte byte : data) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 1099511628211u;
  }
  return hash;
}

struct Stream {
  struct Message {
    std::span<const std::byte> data;
    std::uint64_t sum;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Message> waiting;
  std::size_t sent_bytes = 0;
  std::size_t delivered_bytes = 0;

  // Waits for `ready`; returns false after 60 s.
  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready) {
    return changed.wait_for(lock, std::chrono::seconds(60), ready);
  }
};

class World {
 public:
  World(int size, std::size_t segment_bytes)
      : size_(size),
        segment_bytes_(segment_bytes),
        streams_(static_cast<std::size_t>(size) * static_cast<std::size_t>(size)) {}

  // Runs body(rank) in a thread per rank and checks for unread messages.
  void run(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
    for (const Stream& stream : streams_) EXPECT_TRUE(stream.waiting.empty()) << "unread message";
  }

  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] std::size_t segment_bytes() const { return segment_bytes_; }
  Stream& stream(int from, int to) { return streams_[static_cast<std::size_t>(from * size_ + to)]; }

 private:
  int size_;
  std::size_t segment_bytes_;
  std::vector<Stream> streams_;
};

// A single call of a rank.
class MemoryChannel final : public Channel {
 public:
  MemoryChannel(World& world, int rank) : world_(world), rank_(rank) {
    for (int peer = 0; peer < world.size(); ++peer) {
      Stream& stream = world.stream(rank, peer);
      const std::lock_guard lock(stream.mutex);
      sent_before_.push_back(stream.sent_bytes);
    }
    unsettled_.resize(static_cast<std::size_t>(world.size()));
    slots_.resize(static_cast<std::size_t>(world.size()));
    held_.resize(static_cast<std::size_t>(world.size()));
  }
  ~MemoryChannel() override {
    EXPECT_TRUE(finished_) << "finish() is missing";
    EXPECT_TRUE(std::ranges::none_of(held_, [](char held) { return held != 0; }))
        << "a slot is kept";
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return world_.size(); }
  [[nodiscard]] std::size_t segment_bytes() const override { return world_.segment_bytes(); }

  Status send(int peer, std::span<const std::byte> data) override {
    EXPECT_NE(peer, rank_);
    finished_ = false;
    Stream& stream = world_.stream(rank_, peer);
    const std::lock_guard lock(stream.mutex);
    do {
      const auto segment = data.first(std::min(data.size(), segment_bytes()));
      stream.waiting.push_back({segment, checksum(segment)});
      stream.sent_bytes += segment.size();
      unsettled_[static_cast<std::size_t>(peer)].push_back(
          {stream.waiting.back(), stream.sent_bytes});
      data = data.subspan(segment.size());
    } while (!data.empty());
    stream.changed.notify_all();
    return {};
  }

  Result<std::span<const std::byte>> receive(int peer, std::size_t bytes) override {
    const auto index = static_cast<std::size_t>(peer);
    finished_ = false;
    EXPECT_EQ(held_[index], 0) << "second message of a peer before the first was released";
    Stream& stream = world_.stream(peer, rank_);
    std::unique_lock lock(stream.mutex);
    if (!stream.wait(lock, [&] { return !stream.waiting.empty(); })) return stuck("receive", peer);
    const Stream::Message message = stream.waiting.front();
    if (message.data.size() != bytes) {
      return Status(ErrorCode::order_mismatch, "expected " + std::to_string(bytes) +
                                                   " bytes, got " +
                                                   std::to_string(message.data.size()));
    }
    // The slot starts at an odd offset, because slots promise no alignment to algorithms.
    auto& slot = slots_[index];
    slot.assign(1, std::byte{0});
    slot.insert(slot.end(), message.data.begin(), message.data.end());
    const std::span<const std::byte> view = std::span(slot).subspan(1);
    EXPECT_EQ(checksum(view), message.sum) << "sent memory changed before it was delivered";
    held_[index] = 1;
    stream.waiting.pop_front();
    stream.delivered_bytes += bytes;
    stream.changed.notify_all();
    return view;
  }

  Status release(int peer) override {
    const auto index = static_cast<std::size_t>(peer);
    EXPECT_EQ(held_[index], 1) << "nothing to release";
    held_[index] = 0;
    // Frees the slot at once, so that ASan detects a late access.
    std::vector<std::byte>().swap(slots_[index]);
    return {};
  }

  Status settle(int peer, std::size_t bytes) override {
    Stream& stream = world_.stream(rank_, peer);
    const std::size_t goal = sent_before_[static_cast<std::size_t>(peer)] + bytes;
    std::unique_lock lock(stream.mutex);
    EXPECT_LE(goal, stream.sent_bytes) << "settles more than was sent";
    if (!stream.wait(lock, [&] { return stream.delivered_bytes >= goal; })) {
      return stuck("settle", peer);
    }
    check_unchanged(peer, goal);
    return {};
  }

  Status finish() override {
    finished_ = true;
    for (int peer = 0; peer < world_.size(); ++peer) {
      Stream& stream = world_.stream(rank_, peer);
      std::unique_lock lock(stream.mutex);
      check_unchanged(peer, stream.sent_bytes);
      if (!stream.wait(lock, [&] { return stream.waiting.empty(); })) {
        return stuck("finish", peer);
      }
    }
    return {};
  }

 private:
  struct Unsettled {
    Stream::Message message;
    std::size_t end;  // position in the stream
  };

  // Checks the first `end` bytes of the stream to `peer`: they must be unchanged since the send.
  void check_unchanged(int peer, std::size_t end) {
    auto& segments = unsettled_[static_cast<std::size_t>(peer)];
    while (!segments.empty() && segments.front().end <= end) {
      EXPECT_EQ(checksum(segments.front().message.data), segments.front().message.sum)
          << "sent memory changed before it was settled";
      segments.pop_front();
    }
  }

  [[nodiscard]] Status stuck(const char* what, int peer) const {
    return {ErrorCode::timeout, std::string(what) + " of rank " + std::to_string(rank_) +
                                    " timed out waiting for rank " + std::to_string(peer)};
  }

  World& world_;
  int rank_;
  bool finished_ = false;
  std::vector<std::size_t> sent_before_;
  std::vector<std::deque<Unsettled>> unsettled_;
  std::vector<std::vector<std::byte>> slots_;
  std::vector<char> held_;
};

}  // namespace r2ccl::testing_world
