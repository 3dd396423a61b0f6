// Posted messages of a simulated job: connections in both directions between every pair of ranks,
// with few buffers at each end, over the production part of the link.
//
// Checks: messages arrive in order, with the right bytes; no port writes a buffer after its receive
// was done, or reads a source after its send was done; all messages arrive unless the peer is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "link/posted.hpp"
#include "sim/job.hpp"
#include "sim/random.hpp"
#include "sim/world.hpp"

namespace r2ccl::sim {

class PostedTraffic {
 public:
  PostedTraffic(World& world, const Job::PostedMessages& plan,
                std::function<void(const std::string&)> violate);
  ~PostedTraffic();
  PostedTraffic(const PostedTraffic&) = delete;
  PostedTraffic& operator=(const PostedTraffic&) = delete;

  // Body of the fiber of an end: starts the traffic and returns once all messages are done.
  void run(int rank, int peer);
  // Checks the outcome of all ends; see StreamTraffic::judge().
  void judge(const std::function<TimeNs(int, int)>& lost_since, bool endless, TimeNs slack);
  [[nodiscard]] std::string unfinished() const;  // ends with open messages; empty: none
  [[nodiscard]] std::uint64_t messages() const { return messages_; }

 private:
  // A buffer at rest is filled with garbage, and belongs to the caller.
  struct Buffer {
    std::span<std::byte> bytes;
    std::uint64_t number = 0;  // message
    bool posted = false;
    TimeNs rests_until = 0;
  };
  struct Half {  // an end of a connection
    ConnectionId connection = 0;
    std::uint64_t seed = 0;  // equal at both ends
    std::vector<Buffer> buffers;
    std::uint64_t next = 0;   // messages posted
    std::uint64_t ended = 0;  // messages done
    RailId home = 0;          // of receives
    bool closed = false;      // after the last message; the other end may still wait for a report
  };
  struct End {
    End(LinkEnd& of, std::uint64_t seed) : link_end(of), random(seed) {}
    LinkEnd& link_end;
    Random random;
    std::vector<std::byte> memory;  // of receives
    MemoryId id = 0;
    std::vector<std::byte> sources;
    std::vector<Half> receives;
    std::vector<Half> sends;
    bool begun = false;
    TimeNs begun_at = 0;
    TimeNs moved_at = 0;   // last message that was posted or done
    TimeNs failed_at = 0;  // the owner gave the peer up
    std::string why;
  };

  [[nodiscard]] bool is_over(const End& of) const;
  [[nodiscard]] std::string name(const End& of) const;
  void carry(LinkEnd& at);
  [[nodiscard]] bool receive(End& at, Half& half);
  [[nodiscard]] bool send(End& at, Half& half);
  void give_up_lost(End& at);
  void rest(End& at, Half& half, Buffer& buffer);
  void check_rest(const End& at, const Buffer& buffer);
  [[nodiscard]] std::uint32_t size_of(std::uint64_t seed, std::uint64_t number) const;
  [[nodiscard]] static std::byte byte_at(std::uint64_t seed, std::uint64_t number, std::size_t at);

  World& world_;
  const Job::PostedMessages plan_;
  const std::function<void(const std::string&)> violate_;
  std::map<std::pair<int, int>, std::unique_ptr<End>> ends_;
  std::uint64_t messages_ = 0;
};

}  // namespace r2ccl::sim
