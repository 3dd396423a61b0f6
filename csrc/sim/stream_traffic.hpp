// Byte streams of a simulated job.  Each end of a link has listeners and the production
// multiplexer; the peer's end connects to each listener once its mirror is said to be there.
//
// Checks: the bytes of a stream arrive in order and once; a stream ends as its peer ended it, and
// with a reset of another kind only if the peer is lost; a mirror is there before its listener is
// made known; a reader that stops costs its own stream's memory only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "sim/job.hpp"
#include "sim/random.hpp"
#include "sim/world.hpp"
#include "streams/stream_mux.hpp"

namespace r2ccl::sim {

class StreamTraffic {
 public:
  StreamTraffic(World& world, const Job::Streams& plan,
                std::function<void(const std::string&)> violate);
  ~StreamTraffic();
  StreamTraffic(const StreamTraffic&) = delete;
  StreamTraffic& operator=(const StreamTraffic&) = delete;

  // Body of the fiber of an end: starts the traffic and returns once all streams have ended.
  void run(int rank, int peer);
  // Checks the outcome of all ends.  `lost_since`: time since which two ranks cannot work together;
  // 0: they can.  `endless`: a fence never completes.  `slack`: allowance beyond the link timeout.
  void judge(const std::function<TimeNs(int, int)>& lost_since, bool endless, TimeNs slack);
  [[nodiscard]] std::string unfinished() const;  // ends with open streams; empty: none
  [[nodiscard]] std::uint64_t streams() const { return ended_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  // An end's half of a stream: the bytes to write, and the bytes read so far.
  struct Half {
    std::uint64_t seed = 0;   // of the stream, equal at both ends
    std::uint64_t total = 0;  // bytes to write
    std::uint64_t written = 0;
    std::uint64_t read = 0;
    bool resets = false;    // ends with a reset in place of a FIN
    bool finished = false;  // finish() or reset() was called
    bool over = false;
    TimeNs write_at = 0;
    TimeNs read_at = 0;
    Random random{0};
  };
  struct End {
    End(LinkEnd& of, const StreamMux::Options& options, std::uint64_t seed)
        : link_end(of), mux(options), random(seed) {}
    LinkEnd& link_end;
    StreamMux mux;
    Random random;
    bool begun = false;
    TimeNs failed_at = 0;  // the owner gave the peer up
    TimeNs begun_at = 0;
    std::string why;
    std::set<std::uint16_t> mirrors;               // of the peer's listeners
    std::map<std::uint16_t, std::uint32_t> ended;  // streams of each own listener that are over
    std::map<StreamId, Half> halves;
    std::map<StreamId, std::uint16_t> ports;  // streams to own listeners
    std::uint32_t opened = 0;                 // streams opened here
    std::uint32_t due = 0;                    // streams to open
    std::uint32_t accepted = 0;
  };

  [[nodiscard]] End& end(int rank, int peer);
  [[nodiscard]] const End& end(int rank, int peer) const;
  [[nodiscard]] End& other(const End& of) { return end(of.link_end.peer, of.link_end.rank); }
  [[nodiscard]] std::uint32_t all_streams() const { return plan_.ports * plan_.connections; }
  [[nodiscard]] bool is_over(const End& of) const;
  [[nodiscard]] std::string name(const End& of) const;
  [[nodiscard]] std::uint64_t seed_of(const End& client, const End& server,
                                      std::uint32_t number) const;
  void carry(LinkEnd& at);
  void on_event(End& at, const StreamEvent& event);
  void publish(End& at, std::uint32_t token);
  void connect_soon(End& client);
  void begin_half(End& at, StreamId id, std::uint64_t seed);
  bool move(End& at, StreamId id, Half& half);
  void end_half(End& at, StreamId id, Half& half);
  void wake(End& at, TimeNs when);
  [[nodiscard]] static std::byte byte_at(std::uint64_t seed, bool even, std::uint64_t position);

  World& world_;
  const Job::Streams plan_;
  const std::function<void(const std::string&)> violate_;
  std::map<std::pair<int, int>, std::unique_ptr<End>> ends_;
  std::uint64_t ended_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace r2ccl::sim
