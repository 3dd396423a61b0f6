// What both ends of a new rail connection say before the first frame.  Sans-IO: bytes in, bytes
// out, no socket and no clock.  Four messages of fixed size; every one carries an HMAC-SHA256 under
// the pair's key over all that was said before it and a label of its own, so that none can be
// changed, replayed (both sides bring a fresh nonce) or reflected (the labels differ by role):
//
//   connector  HELLO     -->  both processes, job, rail, last fenced epoch, configuration, nonce
//              CHALLENGE <--  acceptor: proposed epoch, last fenced epoch, nonce
//              AUTH      -->  proof of the key
//              READY     <--  acceptor; frames follow
// Instead of CHALLENGE, the acceptor may send REFUSE: reason, last fenced epoch.
//
// A peer whose HELLO does not authenticate gets no byte back.  A recorded HELLO authenticates too,
// hence the acceptor may change nothing before AUTH.
//
// The acceptor is always the lower process id and numbers the epochs.  Its READY may get lost: then
// it holds an epoch as open that the connector never used.  So a connector that fails after it has
// sent AUTH counts offered_epoch() as fenced.
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

#include "base/sha256.hpp"
#include "link/rail_state.hpp"

namespace r2ccl {

inline constexpr std::uint16_t handshake_version = 1;

using HandshakeKey = std::array<std::byte, 32>;
using HandshakeNonce = std::array<std::byte, 16>;

// The key of one pair of processes, from the job's secret; the same from both ends.
[[nodiscard]] HandshakeKey derive_pair_key(std::span<const std::byte> job_secret, std::uint64_t job,
                                           std::uint32_t process, std::uint32_t peer);

// One number for all settings that both ends must share (slot and chunk sizes).
[[nodiscard]] std::uint64_t config_fingerprint(std::span<const std::uint64_t> settings);

enum class HandshakeState : std::uint8_t { in_progress, established, rejected };

// Why a handshake was rejected.  Only `config` and `refused` are the word of an authenticated peer;
// anybody who reaches the port can cause the others, so nothing may be concluded from them.
enum class HandshakeFault : std::uint8_t {
  none,
  garbage,         // not this protocol, or bytes out of turn
  version,         // another protocol version
  identity,        // another job, unknown or wrong process
  authentication,  // wrong key, changed, replayed or reflected message
  config,          // other slot or chunk sizes
  refused,         // the acceptor does not want this rail now, or the connector not this epoch
  abandoned,       // the caller gave up: connection closed, timeout
  system,          // no random numbers
};

struct Hello {
  std::uint32_t connector = 0;
  std::uint32_t acceptor = 0;  // always below `connector`
  std::uint64_t job = 0;
  std::uint16_t rail = 0;
  RailKind kind = RailKind::tcp;  // tcp, shm or control
  std::uint32_t last_fenced = 0;  // the connector's last fenced epoch of this rail
  std::uint64_t config = 0;       // config_fingerprint
};

struct Decision {
  bool accept = false;
  std::uint32_t epoch = 0;        // above both sides' last fenced epoch
  std::string why;                // if not accepted; for the log of this process only
  std::uint32_t last_fenced = 0;  // the acceptor's last fenced epoch of this rail, also if refused
};

// What the two ends have in common.
class Handshake {
 public:
  virtual ~Handshake();
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  // Takes bytes that arrived.  Keeps at most one message of them, but all that follow READY.
  HandshakeState feed(std::span<const std::byte> data);

  // Ends a handshake that will get no further: "timed out", "the peer closed the connection".
  HandshakeState abandon(std::string_view why);

  // Bytes to send.  A rejected handshake may still have some (REFUSE): send what the socket takes
  // at once, then close.
  [[nodiscard]] std::span<const std::byte> output() const;
  void sent(std::size_t bytes);

  // Bytes after READY: the start of the frame stream.
  [[nodiscard]] std::vector<std::byte> take_leftover();

  [[nodiscard]] HandshakeState state() const { return state_; }
  [[nodiscard]] HandshakeFault fault() const { return fault_; }
  [[nodiscard]] const std::string& reason() const { return reason_; }  // one line for the log

  // Both ends, once established.  The acceptor's HELLO is what the connector claimed and proved.
  [[nodiscard]] const Hello& hello() const { return hello_; }
  [[nodiscard]] std::uint32_t epoch() const { return epoch_; }
  [[nodiscard]] std::uint32_t peer_last_fenced() const { return peer_last_fenced_; }
  // The same at both ends, and of this connection alone: for what they say after it.
  [[nodiscard]] const HandshakeKey& channel_key() const { return channel_key_; }

 protected:
  enum class MessageType : std::uint8_t { hello = 1, challenge, refuse, auth, ready };

  Handshake() = default;

  // Called with a message of an expected type and its full size.
  virtual void on_message(MessageType type, std::span<const std::byte> message) = 0;

  // `other` has the size of `type`.
  void expect(MessageType type, std::optional<MessageType> other = {});
  // Adds the MAC.  Only what was authenticated or sent by ourselves enters the transcript.
  void send(MessageType type, std::vector<std::byte> message);
  [[nodiscard]] bool authentic(MessageType type, std::span<const std::byte> message) const;
  void remember(std::span<const std::byte> message);
  void derive_channel_key();  // once AUTH is in the transcript
  void establish();
  void reject(HandshakeFault fault, std::string reason);  // and sends nothing any more
  void end(HandshakeFault fault, std::string reason);     // rejected, output() stays
  void reject_unauthentic(MessageType type);

  HandshakeKey key_{};
  HandshakeKey channel_key_{};
  Hello hello_;
  std::uint32_t epoch_ = 0;
  std::uint32_t peer_last_fenced_ = 0;

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
  std::vector<std::byte> input_;  // of the message that is expected
  std::vector<std::byte> output_;
  std::vector<std::byte> transcript_;  // all messages so far
  std::vector<std::byte> leftover_;
};

class ConnectorHandshake final : public Handshake {
 public:
  // Looks at the authenticated offer; returns why this epoch is not wanted, empty when it is.
  using Inspect = std::function<std::string(std::uint32_t epoch, std::uint32_t peer_last_fenced)>;

  // HELLO is in output() at once.
  ConnectorHandshake(const Hello& hello, const HandshakeKey& key, Inspect inspect = {});

  // The epoch that AUTH answered, if AUTH was sent.
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
  // The pair key of a process that is expected to connect; empty for anybody else.
  using FindKey = std::function<std::optional<HandshakeKey>(std::uint32_t connector)>;
  // Called for each HELLO with a right MAC, which may be a recording, so nothing may be concluded
  // from it; and again, with `fresh`, when AUTH has arrived: now the connector said it.  Another
  // connection of the same rail may have been established in between.
  using Decide = std::function<Decision(const Hello&, bool fresh)>;

  AcceptorHandshake(const Self& self, FindKey find_key, Decide decide);

 private:
  void on_message(MessageType type, std::span<const std::byte> message) override;
  void on_hello(std::span<const std::byte> message);
  void on_auth(std::span<const std::byte> message);
  [[nodiscard]] std::string objection(const Decision& decision) const;  // empty: none
  void refuse(HandshakeFault fault, std::string reason, std::uint32_t last_fenced = 0);

  Self self_;
  FindKey find_key_;
  Decide decide_;
};

}  // namespace r2ccl
