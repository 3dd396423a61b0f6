// The raw floor: the minimum cost of an all-reduce of two ranks over TCP on this machine.
//
// The floor has a TCP connection on each rail, and polls non-blocking sockets by spinning. A call
// is a full exchange of the bytes and a single reduce pass. There are no headers, no
// acknowledgements, and no copies except the kernel's copies. Messages up to `kOneRailBytes` use
// the first rail. Larger messages are split evenly over the rails. Sends and receives alternate, so
// that the socket buffers of both sides cannot fill up. The kernel tunes the socket buffers: fixed
// sizes measured slower.
//
//   r2serve-floor CONTROL_SOCKET RANK ADDRESS:PORT...   (rank 0 listens, rank 1 connects)
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <span>

#include "operations.hpp"
#include "sockets.hpp"
#include "worker.hpp"

namespace {

using r2serve::bench::die;

constexpr std::size_t kOneRailBytes = 32 * 1024;
// Maximum size of a socket call; limits the working set, so that received data stays in the cache.
constexpr std::size_t kCallBytes = 256 * 1024;

struct Rail {
  int fd;
  std::span<const std::byte> to_send;
  std::span<std::byte> to_receive;
};

bool would_block(ssize_t n) { return n < 0 && (errno == EAGAIN || errno == EINTR); }

void send_some(Rail& rail) {
  const std::size_t want = std::min(rail.to_send.size(), kCallBytes);
  const ssize_t n = ::send(rail.fd, rail.to_send.data(), want, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n > 0) {
    rail.to_send = rail.to_send.subspan(static_cast<std::size_t>(n));
  } else if (!would_block(n)) {
    die("send");
  }
}

void receive_some(Rail& rail) {
  const std::size_t want = std::min(rail.to_receive.size(), kCallBytes);
  const ssize_t n = ::recv(rail.fd, rail.to_receive.data(), want, MSG_DONTWAIT);
  if (n > 0) {
    rail.to_receive = rail.to_receive.subspan(static_cast<std::size_t>(n));
  } else if (!would_block(n)) {
    die("recv");
  }
}

template <typename T>
void add(std::span<std::byte> into, std::span<const std::byte> from) {
  T* __restrict out = reinterpret_cast<T*>(into.data());
  const T* __restrict in = reinterpret_cast<const T*>(from.data());
  const std::size_t count = into.size() / sizeof(T);
  for (std::size_t i = 0; i < count; ++i) out[i] += in[i];
}

class Floor final : public r2serve::bench::Collective {
 public:
  Floor(int rank, std::vector<int> sockets) : rank_(rank) {
    for (const int fd : sockets) rails_.push_back({fd, {}, {}});
  }

  std::string prepare(const r2serve::bench::Request& request) override {
    if (request.op != "all_reduce") return "the floor supports all_reduce only";
    if (request.dtype == "float32") return check<float>(request.bytes);
    if (request.dtype == "float64") return check<double>(request.bytes);
    if (request.dtype == "int32") return check<std::int32_t>(request.bytes);
    return "the floor has no " + request.dtype;
  }

  void once() override {
    exchange();
    add_(data_, inbox_);
  }

 private:
  template <typename T>
  std::string check(std::size_t bytes) {
    add_ = add<T>;
    data_.assign(bytes, std::byte{0});
    inbox_.assign(bytes, std::byte{0});
    T* values = reinterpret_cast<T*>(data_.data());
    const std::size_t count = bytes / sizeof(T);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = static_cast<T>(r2serve::bench::pattern(i, rank_));
    }
    once();
    for (std::size_t i = 0; i < count; ++i) {
      if (values[i] != static_cast<T>(r2serve::bench::pattern_sum(i, 2))) {
        throw r2serve::bench::WrongResult("sum");
      }
    }
    std::fill(data_.begin(), data_.end(), std::byte{0});  // sums of zeros stay finite
    return {};
  }

  void exchange() {
    const std::size_t bytes = data_.size();
    const std::size_t used = bytes <= kOneRailBytes ? 1 : rails_.size();
    std::size_t begin = 0;
    for (std::size_t i = 0; i < used; ++i) {
      const std::size_t end = bytes * (i + 1) / used;
      rails_[i].to_send = std::span<const std::byte>(data_).subspan(begin, end - begin);
      rails_[i].to_receive = std::span<std::byte>(inbox_).subspan(begin, end - begin);
      begin = end;
    }
    for (bool busy = true; busy;) {
      busy = false;
      for (std::size_t i = 0; i < used; ++i) {
        Rail& rail = rails_[i];
        if (!rail.to_send.empty()) send_some(rail);
        if (!rail.to_receive.empty()) receive_some(rail);
        busy = busy || !rail.to_send.empty() || !rail.to_receive.empty();
      }
    }
  }

  int rank_;
  std::vector<Rail> rails_;
  std::vector<std::byte> data_;
  std::vector<std::byte> inbox_;
  void (*add_)(std::span<std::byte>, std::span<const std::byte>) = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s CONTROL_SOCKET RANK ADDRESS:PORT...\n", argv[0]);
    return 2;
  }
  const int rank = std::atoi(argv[2]);
  r2serve::bench::pin_rank(rank);
  std::vector<int> sockets;
  for (int i = 3; i < argc; ++i) {
    const sockaddr_in address = r2serve::bench::parse_address(argv[i]);
    const int fd =
        rank == 0 ? r2serve::bench::accept_one(address) : r2serve::bench::connect_to(address, true);
    r2serve::bench::set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    if (::fcntl(fd, F_SETFL, O_NONBLOCK) != 0) die("fcntl");
    sockets.push_back(fd);
  }
  Floor floor(rank, std::move(sockets));
  r2serve::bench::Control control(argv[1], rank);
  return r2serve::bench::serve(control, floor, rank);
}
