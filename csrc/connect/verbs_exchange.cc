#include "connect/verbs_exchange.hpp"

#include <algorithm>
#include <cstring>

namespace r2ccl {
namespace {

// Body of a message; numbers are little-endian.
struct Body {
  std::uint32_t connected;  // 1: all other fields are unused
  std::uint32_t queue_pair;
  std::uint32_t first_packet;
  std::uint32_t mtu;
  std::uint32_t lid;
  std::uint32_t ring_key;
  std::uint64_t ring_address;
  std::array<std::byte, 16> gid;
  std::uint64_t unused;
};
static_assert(sizeof(Body) == 56);

}  // namespace

void VerbsExchange::send_endpoint(const VerbsEndpoint& own) {
  const Body body{.connected = 0,
                  .queue_pair = own.address.queue_pair,
                  .first_packet = own.address.first_packet,
                  .mtu = own.address.mtu,
                  .lid = own.address.lid,
                  .ring_key = own.ring_key,
                  .ring_address = own.ring_address,
                  .gid = own.address.gid,
                  .unused = 0};
  send(std::as_bytes(std::span(&body, 1)));
}

void VerbsExchange::send_connected() {
  Body body{};
  body.connected = 1;
  send(std::as_bytes(std::span(&body, 1)));
}

void VerbsExchange::send(std::span<const std::byte> body) {
  const Digest digest = mac(connector_, body);
  output_.insert(output_.end(), body.begin(), body.end());
  output_.insert(output_.end(), digest.begin(), digest.end());
}

Digest VerbsExchange::mac(bool connector, std::span<const std::byte> body) const {
  const std::byte role{connector ? std::uint8_t{1} : std::uint8_t{2}};
  HmacSha256 hmac(key_);
  hmac.update({&role, 1});
  hmac.update(body);
  return hmac.finish();
}

bool VerbsExchange::feed(std::span<const std::byte> data) {
  while (!data.empty()) {
    const std::size_t part = std::min(data.size(), input_.size() - input_bytes_);
    std::memcpy(input_.data() + input_bytes_, data.data(), part);
    input_bytes_ += part;
    data = data.subspan(part);
    if (input_bytes_ < input_.size()) return true;
    input_bytes_ = 0;
    if (!take(input_)) return false;
  }
  return true;
}

// Accepts the endpoint first, then the confirmation of the connection, and nothing else.
bool VerbsExchange::take(const Message& message) {
  const auto bytes = std::span(message);
  if (!equal_in_constant_time(mac(!connector_, bytes.first(body_bytes)), bytes.subspan(body_bytes)))
    return false;
  Body body;
  std::memcpy(&body, message.data(), sizeof(body));
  if (peer_connected_ || (body.connected != 0) != peer_.has_value()) return false;
  if (body.connected != 0) {
    peer_connected_ = true;
    return true;
  }
  peer_ = {.address = {.queue_pair = body.queue_pair,
                       .first_packet = body.first_packet & 0xFFFFFFU,
                       .mtu = body.mtu,
                       .lid = static_cast<std::uint16_t>(body.lid),
                       .gid = body.gid},
           .ring_address = body.ring_address,
           .ring_key = body.ring_key};
  return true;
}

}  // namespace r2ccl
