// The handshake of a new rail connection, before the first frame.
//
// Sans-IO: bytes in, bytes out, no socket and no clock.  The handshake has four messages of fixed
// size.  Every message carries an HMAC-SHA256 under the pair's key.  The HMAC covers a label of the
// message type, all earlier messages and the message itself.  No message can be changed, replayed
// (both ends send a fresh nonce) or reflected (the labels differ by role):
//
//   connector  HELLO     -->  both processes, job, rail, last fenced epoch, configuration, nonce
//              CHALLENGE <--  acceptor: proposed epoch, last fenced epoch, nonce
//              AUTH      -->  proof of the key
//              READY     <--  acceptor; frames follow
// Instead of CHALLENGE, the acceptor may send REFUSE: reason, last fenced epoch.
//
// A peer with an unauthentic HELLO receives no byte.  A recorded HELLO is authentic as well, so the
// acceptor changes no state before AUTH.
//
// The acceptor is always the process with the lower number.  The acceptor numbers the epochs.  If
// READY is lost, the acceptor has an open epoch that the connector never used.  A connector that
// fails after AUTH therefore counts offered_epoch() as fenced.
//
// Every message begins with the versions of handshake and frames.  Both ends compare the versions
// before any other byte.  The error therefore names another release, even if keys differ as well.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/limits.hpp"
#include "base/sha256.hpp"
#include "link/rail_state.hpp"

namespace r2ccl {

inline constexpr std::uint16_t handshake_version = 2;

using HandshakeKey = std::array<std::byte, 32>;
using HandshakeNonce = std::array<std::byte, 16>;

// Derives the key of a pair of processes from a secret shared by both.  Both ends get the same key.
[[nodiscard]] HandshakeKey derive_pair_key(std::span<const std::byte> job_secret, std::uint64_t job,
                                           std::uint32_t process, std::uint32_t peer);

// Returns a fingerprint of the settings and limits that both ends must share, in a fixed order.
[[nodiscard]] std::uint64_t config_fingerprint(
    std::span<const std::uint64_t> settings, std::span<const std::uint64_t> limits = shared_limits);

enum class HandshakeState : std::uint8_t { in_progress, established, rejected };

// Reason of a rejection.  Only `config` and `refused` come from an authenticated peer.  Any process
// that reaches the port can cause the others, so they prove nothing.
enum class HandshakeFault : std::uint8_t {
  none,
  garbage,         // another protocol, or unexpected bytes
  version,         // another version of handshake or frames
  identity,        // another job; unknown or wrong process
  authentication,  // wrong key; changed, replayed or reflected message
  config,          // another configuration fingerprint
  refused,         // the acceptor refuses the rail for now, or the connector refuses the epoch
  abandoned,       // ended by the caller: connection closed, timeout
  system,          // no random numbers
};

// The host and port at an end of a connection, for logs and listings.  The peer receives printable
// characters only, and at most max_name_bytes of each name.
struct EndNames {
  std::string host;
  std::string port;  // "eth0", "eth0/mlx5_0:1"; empty: the rail has no port
};
inline constexpr std::size_t max_name_bytes = 32;

struct Hello {
  std::uint32_t connector = 0;
  std::uint32_t acceptor = 0;  // always below `connector`
  std::uint64_t job = 0;
  std::uint16_t rail = 0;
  RailKind kind = RailKind::tcp;  // tcp, shm, control or verbs
  std::uint32_t last_fenced = 0;  // the connector's last fenced epoch of this rail
  std::uint64_t config = 0;       // result of config_fingerprint()
  EndNames names = {};            // the connector's
};

struct Decision {
  bool accept = false;
  std::uint32_t epoch = 0;  // above the last fenced epoch of both ends
  std::string why;          // reason of a refusal; logged by this process only
  // the acceptor's last fenced epoch of this rail, also after a refusal
  std::uint32_t last_fenced = 0;
  EndNames names = {};  // the acceptor's
};

// Common part of both ends.
class Handshake {
 public:
  virtual ~Handshake();
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  // Consumes received bytes.  Buffers a single message at most, and all bytes after READY.
  HandshakeState feed(std::span<const std::byte> data);

  // Ends an unfinished handshake.  `why` is, for example, "timed out".
  HandshakeState abandon(std::string_view why);

  // Returns the bytes to send, valid until the next call.  sent() removes bytes from the front.  A
  // rejected handshake may still hold a REFUSE: send as much as the socket takes at once, then
  // close.
  [[nodiscard]] std::span<const std::byte> output() const;
  void sent(std::size_t bytes);

  // Returns the bytes received after READY: the start of the frame stream.
  [[nodiscard]] std::vector<std::byte> take_leftover();

  [[nodiscard]] HandshakeState state() const { return state_; }
  [[nodiscard]] HandshakeFault fault() const { return fault_; }
  [[nodiscard]] const std::string& reason() const { return reason_; }  // a single line for the log

  // Returns true once this acceptor has accepted a HELLO.  Its MAC is valid, but the HELLO may be a
  // recording.
  [[nodiscard]] bool claimed() const { return epoch_ != 0; }

  // Valid once established.  At the acceptor, hello() holds the connector's authenticated claim.
  [[nodiscard]] const Hello& hello() const { return hello_; }
  [[nodiscard]] std::uint32_t epoch() const { return epoch_; }
  [[nodiscard]] std::uint32_t peer_last_fenced() const { return peer_last_fenced_; }
  // Host and port at the peer's end.
  [[nodiscard]] const EndNames& peer_names() const { return peer_names_; }
  // Key of this connection alone, equal at both ends, for messages after the handshake.
  [[nodiscard]] const HandshakeKey& channel_key() const { return channel_key_; }

 protected:
  enum class MessageType : std::uint8_t { hello = 1, challenge, refuse, auth, ready };

  Handshake() = default;

  // Handles a complete message of an expected type.
  virtual void on_message(MessageType type, std::span<const std::byte> message) = 0;

  // Sets the next accepted types.  `other` must have the same size as `type`.
  void expect(MessageType type, std::optional<MessageType> other = {});
  // Appends the MAC and queues the message.  The transcript contains only sent and authenticated
  // messages.
  void send(MessageType type, std::vector<std::byte> message);
  [[nodiscard]] bool authentic(MessageType type, std::span<const std::byte> message) const;
  void remember(std::span<const std::byte> message);
  void derive_channel_key();  // requires AUTH in the transcript
  void establish();
  void reject(HandshakeFault fault, std::string reason);  // rejects and discards output()
  void end(HandshakeFault fault, std::string reason);     // rejects, but keeps output()
  void reject_unauthentic(MessageType type);

  HandshakeKey key_{};
  HandshakeKey channel_key_{};
  Hello hello_;
  std::uint32_t epoch_ = 0;
  std::uint32_t peer_last_fenced_ = 0;
  EndNames peer_names_;

 private:
  static std::string_view name_of(MessageType type);
  static std::size_t bytes_of(MessageType type);
  void check_header();
  [[nodiscard]] Digest mac(MessageType type, std::span<const std::byte> body) const;

  HandshakeState state_ = HandshakeState::in_progress;
  HandshakeFault fault_ = HandshakeFault::none;
  std::string reason_;
  MessageType expected_ = MessageType::hello;
  std::optional<MessageType> expected_other_;
  std::vector<std::byte> input_;  // bytes of the expected message
  std::vector<std::byte> output_;
  std::vector<std::byte> transcript_;  // all messages in order
  std::vector<std::byte> leftover_;
};

class ConnectorHandshake final : public Handshake {
 public:
  // Judges the authenticated offer.  Returns the reason of a refusal, or an empty string.
  using Inspect = std::function<std::string(std::uint32_t epoch, std::uint32_t peer_last_fenced)>;

  // Queues HELLO in output() at once.
  ConnectorHandshake(const Hello& hello, const HandshakeKey& key, Inspect inspect = {});

  // Returns the epoch confirmed with AUTH, if AUTH was sent.
  [[nodiscard]] std::optional<std::uint32_t> offered_epoch() const { return offered_epoch_; }

 private:
  void on_message(MessageType type, std::span<const std::byte> message) override;
  void on_challenge(std::span<const std::byte> message);
  void on_refuse(std::span<const std::byte> message);

  Inspect inspect_;
  std::optional<std::uint32_t> offered_epoch_;
};

class AcceptorHandshake final : public Handshake {
 public:
  struct Self {
    std::uint32_t process = 0;
    std::uint64_t job = 0;
    std::uint64_t config = 0;
  };
  // Returns the pair key of an expected process, or nullopt for all others.
  using FindKey = std::function<std::optional<HandshakeKey>(std::uint32_t connector)>;
  // Decides about a HELLO with a valid MAC.  The first call (`fresh` = false) may concern a
  // recorded HELLO, so it must not change state.  The second call (`fresh` = true) follows AUTH,
  // which proves the sender.  Another connection of the same rail may be established between the
  // calls.
  using Decide = std::function<Decision(const Hello&, bool fresh)>;

  AcceptorHandshake(const Self& self, FindKey find_key, Decide decide);

 private:
  void on_message(MessageType type, std::span<const std::byte> message) override;
  void on_hello(std::span<const std::byte> message);
  void on_auth(std::span<const std::byte> message);
  [[nodiscard]] std::string objection(const Decision& decision) const;  // empty: no objection
  void refuse(HandshakeFault fault, std::string reason, std::uint32_t last_fenced = 0);

  Self self_;
  FindKey find_key_;
  Decide decide_;
};

}  // namespace r2ccl
