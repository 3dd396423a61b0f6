// Messages of a verbs rail over the connection of the handshake, before the first frame.  Each end
// sends its endpoint, then "connected".  Sans-IO.  Every message is authenticated with the key of
// the connection and a label of the sender's role.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "connect/handshake.hpp"
#include "rails/verbs/session.hpp"

namespace r2ccl {

class VerbsExchange {
 public:
  VerbsExchange(const HandshakeKey& key, bool connector) : key_(key), connector_(connector) {}
  ~VerbsExchange() { wipe(key_); }
  VerbsExchange(const VerbsExchange&) = delete;
  VerbsExchange& operator=(const VerbsExchange&) = delete;

  void send_endpoint(const VerbsEndpoint& own);
  void send_connected();

  // Consumes received bytes.  Returns false on a message that is unauthentic or out of order.
  [[nodiscard]] bool feed(std::span<const std::byte> data);
  [[nodiscard]] std::span<const std::byte> output() const { return output_; }
  void sent(std::size_t bytes) {
    output_.erase(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(bytes));
  }

  // Returns the peer's endpoint; empty until received.
  [[nodiscard]] const std::optional<VerbsEndpoint>& peer() const { return peer_; }
  [[nodiscard]] bool peer_connected() const { return peer_connected_; }

 private:
  static constexpr std::size_t body_bytes = 56;
  using Message = std::array<std::byte, body_bytes + sizeof(Digest)>;

  void send(std::span<const std::byte> body);
  [[nodiscard]] Digest mac(bool connector, std::span<const std::byte> body) const;
  bool take(const Message& message);

  HandshakeKey key_;
  const bool connector_;
  std::vector<std::byte> output_;
  Message input_{};
  std::size_t input_bytes_ = 0;
  std::optional<VerbsEndpoint> peer_;
  bool peer_connected_ = false;
};

}  // namespace r2ccl
