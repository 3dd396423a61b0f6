// A connection of the simulated world, modelled on a kernel's TCP: a send buffer, segments in
// flight, a receive buffer.  Both directions are ordered and reliable until an end closes the
// connection or the path resets the connection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rails/byte_pipe.hpp"
#include "sim/path.hpp"

namespace r2ccl::sim {

class Connection {
 public:
  Connection(EventQueue& events, Random& random, const Delays& delays, Path& path);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void attach(Side side, EventSink& end) { ends_[side] = &end; }
  // write() and read() move as many bytes as possible without waiting and return their number.
  std::size_t write(Side side, std::span<const std::byte> bytes);
  std::size_t read(Side side, std::span<std::byte> room);
  [[nodiscard]] bool broken(Side side) const { return ends_[side] == nullptr; }
  [[nodiscard]] PathReport path(Side side) const;
  void close(Side side);              // immediate; the peer gets a reset
  void reset(Side first);             // by the path: breaks `first` now, the other end later
  void retry();                       // the path has healed
  void silence() { silent_ = true; }  // drops later resets of this connection

 private:
  struct Segment {
    std::vector<std::byte> bytes;
    bool reset = false;
    bool received = false;  // the receiver's NIC has counted the segment
  };
  struct Lane {
    std::vector<std::byte> to_send;
    std::vector<std::byte> held;   // acknowledged by a middlebox, not yet delivered
    std::vector<std::byte> inbox;  // arrived, not yet read
    TimeNs free_at = 0;            // end of the current transmission
    std::uint64_t written = 0;
    std::uint64_t arrived = 0;  // at the middlebox, if one acknowledges
    std::uint64_t acked = 0;
    bool ack_due = false;
    bool ack_lost = false;
  };

  void transmit(Side from);
  TimeNs arrive(Side from, Segment& segment);
  void deliver_held(Side from);
  void schedule_ack(Side from);
  void acknowledge(Side from);
  void break_end(Side side);
  void notify(Side side) {
    if (ends_[side] != nullptr) ends_[side]->on_event();
  }

  EventQueue& events_;
  Random& random_;
  const Delays& delays_;
  Path& path_;
  std::array<Lane, 2> lanes_;  // by sending side
  std::array<DelayLine<Segment>, 2> delay_lines_;
  std::array<EventSink*, 2> ends_{};
  bool silent_ = false;
};

// A connection end, as the byte pipe of a production rail.
class SimPipe final : public BytePipe {
 public:
  SimPipe(Connection& connection, Side side, Random& random)
      : connection_(connection), side_(side), random_(random) {}
  ~SimPipe() override { connection_.close(side_); }
  SimPipe(const SimPipe&) = delete;
  SimPipe& operator=(const SimPipe&) = delete;

  Io write(std::span<const iovec> parts, std::size_t& bytes) override;
  Io read(std::span<const iovec> parts, std::size_t& bytes) override;
  PathReport path() override { return connection_.path(side_); }
  [[nodiscard]] int fd() const override { return -1; }
  [[nodiscard]] short arm(bool /*for_write*/) override { return 0; }

 private:
  Connection& connection_;
  const Side side_;
  Random& random_;
};

}  // namespace r2ccl::sim
