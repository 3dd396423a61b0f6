// The exchange of two processes before their first link: sans-IO, bytes in and bytes out.
//
// The acceptor's handle reaches the connector over NCCL's bootstrap, with a secret.  The connector
// dials an address of the handle:
//
//   connector  CALL     -->  both processes, number of the listener, number of the connection
//              ANSWER   <--  acceptor: its NICs, and the key of the pair if it makes the key
//              DETAILS  -->  connector: the same
//              DONE     <--  acceptor; both ends of the connection are open
// The acceptor may send REFUSE with a reason in place of ANSWER and DONE.
//
// Every message ends with an HMAC-SHA256 under the secret, over all earlier messages and the
// message itself.  A pre-shared key of all ranks (R2CCL_SECRET_FILE) enters the secret, so that the
// handle alone does not tell it.  The process with the lower number makes the key of the pair,
// once, so that exchanges in both directions agree.  The key travels under a one-time pad: an HMAC
// of both processes' nonces.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/sha256.hpp"
#include "link/posted.hpp"
#include "netplugin/nics.hpp"
#include "netplugin/pairing.hpp"

namespace r2ccl::net {

using EngineId = std::array<std::byte, 16>;
using Secret = std::array<std::byte, 16>;
using PairKey = Digest;

// Returns the secret of exchanges over a handle with `secret`.  `key`: pre-shared; empty: none.
[[nodiscard]] Secret with_key(const Secret& secret, std::span<const std::byte> key);
// Returns a part of the handle that tells a wrong key; 0 without a key.
[[nodiscard]] std::uint32_t check_of_key(const Secret& secret, std::span<const std::byte> key);

// What NCCL's bootstrap carries from the receiver to the sender: at most nccl_handle_bytes.
struct Handle {
  static constexpr std::size_t most_places = 4;
  std::uint32_t process = 0;
  std::uint32_t key_check = 0;  // see check_of_key()
  std::uint64_t listener = 0;
  Secret secret{};
  std::vector<Place> places;  // of different NICs
  // Number of the sender's attempt, kept in the handle between two calls of NCCL; 0: none.
  std::uint64_t dial = 0;
};
void write(const Handle& handle, std::span<std::byte> to);
// Returns invalid_argument for bytes that no plugin of this version has written.
Result<Handle> read_handle(std::span<const std::byte> from);
void write_dial(std::uint64_t dial, std::span<std::byte> handle);

// An end of a link.
struct Description {
  EngineId engine{};
  std::uint32_t process = 0;
  std::string host;
  NodeIdentity node{};
  std::string shm;                  // name of the unix socket for shared memory
  std::vector<RailListener> rails;  // of each NIC
};

struct Call {
  std::uint64_t listener = 0;
  ConnectionId connection = 0;
  std::uint16_t nic = 0;  // of the connector
  std::uint32_t process = 0;
};

enum class ExchangeState : std::uint8_t { in_progress, done, failed };

// Common part of both ends.
class ExchangeEnd {
 public:
  // Takes received bytes.
  void feed(std::span<const std::byte> bytes);
  // Returns the bytes to send; sent() removes bytes from the front.
  [[nodiscard]] std::span<const std::byte> output() const { return output_; }
  void sent(std::size_t bytes);
  [[nodiscard]] ExchangeState state() const { return state_; }
  [[nodiscard]] const std::string& why() const { return why_; }  // of a failure
  [[nodiscard]] bool refused() const { return refused_; }        // the peer's answer is final
  // The key of the pair that the peer has made; empty: this process makes it.
  [[nodiscard]] const std::optional<PairKey>& peer_key() const { return peer_key_; }
  [[nodiscard]] const Description& peer() const { return peer_; }

 protected:
  enum class Type : std::uint16_t { call = 1, answer, details, done, refuse };
  using Nonce = std::array<std::byte, 16>;

  explicit ExchangeEnd(const Secret& secret) : secret_(secret) {}
  ~ExchangeEnd() = default;

  virtual void on_message(Type type, std::span<const std::byte> body) = 0;
  void send(Type type, std::span<const std::byte> body);
  void fail(const std::string& why);
  void finish() { state_ = ExchangeState::done; }
  [[nodiscard]] PairKey padded(const PairKey& key, const Nonce& connector,
                               const Nonce& acceptor) const;

  Description peer_;
  std::optional<PairKey> peer_key_;
  bool refused_ = false;

 private:
  [[nodiscard]] bool take();
  [[nodiscard]] Digest mac(std::span<const std::byte> message) const;

  const Secret secret_;
  ExchangeState state_ = ExchangeState::in_progress;
  std::string why_;
  std::vector<std::byte> input_;
  std::vector<std::byte> output_;
  std::vector<std::byte> transcript_;
};

class ExchangeConnector final : public ExchangeEnd {
 public:
  // Sends CALL.
  ExchangeConnector(const Secret& secret, const Call& call, const std::array<std::byte, 16>& nonce);

  // True once ANSWER is there, and until details().
  [[nodiscard]] bool answer_due() const { return answered_ && !details_sent_; }
  // Sends DETAILS; `key`: of the pair, if this process makes it.
  void details(const Description& own, const std::optional<PairKey>& key);

 private:
  void on_message(Type type, std::span<const std::byte> body) override;

  const Nonce nonce_;
  Nonce peer_nonce_{};
  bool answered_ = false;
  bool details_sent_ = false;
};

class ExchangeAcceptor final : public ExchangeEnd {
 public:
  ExchangeAcceptor(const Secret& secret, const std::array<std::byte, 16>& nonce)
      : ExchangeEnd(secret), nonce_(nonce) {}

  enum class Wants : std::uint8_t { bytes, answer, verdict };
  // answer: CALL is there, and answer() or refuse() is due.  verdict: DETAILS are there, and
  // accept() or refuse() is due.
  [[nodiscard]] Wants wants() const { return wants_; }
  [[nodiscard]] const Call& call() const { return call_; }
  void answer(const Description& own, const std::optional<PairKey>& key);
  void accept();
  void refuse(const std::string& why);

 private:
  void on_message(Type type, std::span<const std::byte> body) override;

  const Nonce nonce_;
  Nonce peer_nonce_{};
  Call call_;
  Wants wants_ = Wants::bytes;
};

}  // namespace r2ccl::net
