// TCP sockets of the native contenders: addresses as ADDRESS:PORT, connections and byte strings.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "worker.hpp"

namespace r2serve::bench {

inline sockaddr_in parse_address(std::string_view text) {
  const auto colon = text.rfind(':');
  sockaddr_in address{};
  address.sin_family = AF_INET;
  const std::string host(text.substr(0, colon));
  const int port = std::atoi(std::string(text.substr(colon + 1)).c_str());
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) die("address");
  return address;
}

inline void set_option(int fd, int level, int name, int value) {
  if (::setsockopt(fd, level, name, &value, sizeof value) != 0) die("setsockopt");
}

inline int new_socket() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0) die("socket");
  set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  return fd;
}

inline int accept_one(const sockaddr_in& address) {
  const int listener = new_socket();
  if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    die("bind");
  }
  if (::listen(listener, 1) != 0) die("listen");
  const int fd = ::accept(listener, nullptr, nullptr);
  if (fd < 0) die("accept");
  ::close(listener);
  return fd;
}

// Connects to `address`. `from_there`: the local end uses the same IP address, as on a loopback
// rail.
inline int connect_to(const sockaddr_in& address, bool from_there) {
  sockaddr_in source = address;
  source.sin_port = 0;
  const auto* near = reinterpret_cast<const sockaddr*>(&source);
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const int fd = new_socket();
    if (from_there && ::bind(fd, near, sizeof source) != 0) die("bind");
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
    ::close(fd);
    ::usleep(10'000);  // the other process may not listen yet
  }
  die("connect");
  return -1;
}

inline void send_all(int fd, const void* bytes, std::size_t count) {
  const auto* from = static_cast<const char*>(bytes);
  for (std::size_t done = 0; done < count;) {
    const ssize_t n = ::send(fd, from + done, count - done, MSG_NOSIGNAL);
    if (n <= 0) die("send");
    done += static_cast<std::size_t>(n);
  }
}

inline void receive_all(int fd, void* bytes, std::size_t count) {
  auto* into = static_cast<char*>(bytes);
  for (std::size_t done = 0; done < count;) {
    const ssize_t n = ::recv(fd, into + done, count - done, 0);
    if (n <= 0) die("recv");
    done += static_cast<std::size_t>(n);
  }
}

// Sends the length of `text`, then the bytes.
inline void send_text(int fd, const std::string& text) {
  const std::uint64_t length = text.size();
  send_all(fd, &length, sizeof length);
  send_all(fd, text.data(), text.size());
}

inline std::string receive_text(int fd) {
  constexpr std::uint64_t kLongest = 1 << 20;
  std::uint64_t length = 0;
  receive_all(fd, &length, sizeof length);
  if (length > kLongest) die("length of a text");
  std::string text(length, '\0');
  receive_all(fd, text.data(), text.size());
  return text;
}

}  // namespace r2serve::bench
