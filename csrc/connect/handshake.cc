#include "connect/handshake.hpp"

#include <errno.h>
#include <sys/random.h>

#include <algorithm>
#include <concepts>
#include <cstdio>
#include <sstream>
#include <utility>

#include "link/frame.hpp"

namespace r2ccl {
namespace {

constexpr std::uint32_t handshake_magic = 0x31483252;  // "R2H1"

// Byte offsets in messages.  Numbers are little-endian; unnamed bytes are zero.
namespace at {
constexpr std::size_t magic = 0, version = 4, frames = 6, type = 8, detail = 9, body = 12;
constexpr std::size_t hello_connector = 12, hello_acceptor = 16, hello_job = 20, hello_rail = 28,
                      hello_last_fenced = 32, hello_config = 36, hello_host = 44, hello_port = 76,
                      hello_nonce = 108;
constexpr std::size_t challenge_epoch = 12, challenge_last_fenced = 16, challenge_host = 20,
                      challenge_port = 52, challenge_nonce = 84;
constexpr std::size_t refuse_config = 12, refuse_last_fenced = 20;
}  // namespace at

constexpr std::size_t mac_bytes = sizeof(Digest);
constexpr std::size_t hello_bytes = at::hello_nonce + sizeof(HandshakeNonce) + mac_bytes;
constexpr std::size_t answer_bytes = at::challenge_nonce + sizeof(HandshakeNonce) + mac_bytes;
constexpr std::size_t proof_bytes = at::body + mac_bytes;

template <std::unsigned_integral T>
void put(std::span<std::byte> message, std::size_t position, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    message[position + i] = static_cast<std::byte>(value >> (8 * i) & 0xff);
  }
}

template <std::unsigned_integral T>
T get(std::span<const std::byte> message, std::size_t position) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value |= std::to_integer<std::uint64_t>(message[position + i]) << (8 * i);
  }
  return static_cast<T>(value);
}

void put_name(std::span<std::byte> message, std::size_t position, std::string_view name) {
  std::ranges::copy(std::as_bytes(std::span(name.substr(0, max_name_bytes))),
                    message.subspan(position).begin());
}

std::string get_name(std::span<const std::byte> message, std::size_t position) {
  std::string name;
  for (const std::byte byte : message.subspan(position, max_name_bytes)) {
    const auto character = std::to_integer<char>(byte);
    if (character == '\0') break;
    name += character > ' ' && character <= '~' ? character : '?';
  }
  return name;
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

template <typename... Items>
std::string concat(const Items&... items) {
  std::ostringstream text;
  (text << ... << items);
  return text.str();
}

std::string hex(std::uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

bool fill_random(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    out = out.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

bool is_connection_kind(unsigned kind) { return kind <= static_cast<unsigned>(RailKind::verbs); }

std::string config_mismatch(std::uint32_t peer, std::uint64_t ours, std::uint64_t theirs) {
  return concat(
      "process ", peer,
      " runs another configuration: slot_bytes, slots, chunk_bytes, spare_slots, "
      "algorithm, resilience, checksum, fallback, consensus, consensus_result and the limits of "
      "the release must be equal (fingerprint ",
      hex(theirs), ", ours ", hex(ours), ")");
}

}  // namespace

HandshakeKey derive_pair_key(std::span<const std::byte> job_secret, std::uint64_t job,
                             std::uint32_t process, std::uint32_t peer) {
  std::array<std::byte, 16> who{};
  put(std::span(who), 0, job);
  put(std::span(who), 8, std::min(process, peer));
  put(std::span(who), 12, std::max(process, peer));
  HmacSha256 hmac(job_secret);
  hmac.update(as_bytes("r2ccl pair key\n"));
  hmac.update(who);
  return hmac.finish();
}

std::uint64_t config_fingerprint(std::span<const std::uint64_t> settings,
                                 std::span<const std::uint64_t> limits) {
  Sha256 hash;
  for (const auto& values : {settings, limits}) {
    for (const std::uint64_t value : values) {
      std::array<std::byte, 8> bytes{};
      put(std::span(bytes), 0, value);
      hash.update(bytes);
    }
  }
  return get<std::uint64_t>(hash.finish(), 0);
}

std::string_view Handshake::name_of(MessageType type) {
  switch (type) {
    case MessageType::hello: return "HELLO";
    case MessageType::challenge: return "CHALLENGE";
    case MessageType::refuse: return "REFUSE";
    case MessageType::auth: return "AUTH";
    case MessageType::ready: return "READY";
  }
  return "unknown";
}

std::size_t Handshake::bytes_of(MessageType type) {
  switch (type) {
    case MessageType::hello: return hello_bytes;
    case MessageType::challenge:
    case MessageType::refuse: return answer_bytes;
    case MessageType::auth:
    case MessageType::ready: return proof_bytes;
  }
  return 0;
}

Handshake::~Handshake() {
  wipe(key_);
  wipe(channel_key_);
}

HandshakeState Handshake::feed(std::span<const std::byte> data) {
  while (state_ == HandshakeState::in_progress && !data.empty()) {
    const std::size_t wanted = bytes_of(expected_) - input_.size();
    const std::size_t part = std::min(wanted, data.size());
    input_.insert(input_.end(), data.begin(), data.begin() + static_cast<std::ptrdiff_t>(part));
    data = data.subspan(part);
    check_header();
    if (state_ != HandshakeState::in_progress || part < wanted) continue;

    const MessageType type = static_cast<MessageType>(get<std::uint8_t>(input_, at::type));
    const std::vector<std::byte> message = std::exchange(input_, {});
    on_message(type, message);
    // Extra bytes are an error: the peer cannot know its next message before our answer.  READY is
    // the last message, so frames may follow READY at once.
    if (!data.empty() && type != MessageType::ready && state_ != HandshakeState::rejected) {
      reject(HandshakeFault::garbage, concat(data.size(), " extra bytes after ", name_of(type)));
    }
  }
  if (state_ == HandshakeState::established) {
    leftover_.insert(leftover_.end(), data.begin(), data.end());
  }
  return state_;
}

HandshakeState Handshake::abandon(std::string_view why) {
  if (state_ == HandshakeState::in_progress) {
    reject(HandshakeFault::abandoned,
           concat(why, " with ", input_.size(), " of ", bytes_of(expected_), " bytes of ",
                  name_of(expected_), " received"));
  }
  return state_;
}

std::span<const std::byte> Handshake::output() const { return output_; }

void Handshake::sent(std::size_t bytes) {
  output_.erase(output_.begin(),
                output_.begin() + static_cast<std::ptrdiff_t>(std::min(bytes, output_.size())));
}

std::vector<std::byte> Handshake::take_leftover() { return std::exchange(leftover_, {}); }

void Handshake::expect(MessageType type, std::optional<MessageType> other) {
  expected_ = type;
  expected_other_ = other;
}

// Checks the header of a possibly incomplete message, so garbage is rejected at its first bytes.
void Handshake::check_header() {
  std::array<std::byte, 4> magic{};
  put(std::span(magic), 0, handshake_magic);
  const std::size_t seen = std::min(input_.size(), magic.size());
  if (!std::equal(input_.begin(), input_.begin() + static_cast<std::ptrdiff_t>(seen),
                  magic.begin())) {
    return reject(HandshakeFault::garbage, "not an r2ccl peer (wrong first bytes)");
  }
  if (input_.size() < at::frames) return;
  if (const auto version = get<std::uint16_t>(input_, at::version); version != handshake_version) {
    return reject(HandshakeFault::version,
                  concat("the peer runs another release of r2serve: its handshake has version ",
                         version, ", ours ", handshake_version));
  }
  if (input_.size() < at::type) return;
  if (const auto frames = get<std::uint16_t>(input_, at::frames); frames != frame_version) {
    return reject(HandshakeFault::version,
                  concat("the peer runs another release of r2serve: its frames have version ",
                         frames, ", ours ", frame_version));
  }
  if (input_.size() < at::detail) return;
  const unsigned type = get<std::uint8_t>(input_, at::type);
  if (type != static_cast<unsigned>(expected_) &&
      !(expected_other_ && type == static_cast<unsigned>(*expected_other_))) {
    reject(HandshakeFault::garbage,
           concat("message type ", type, " where ", name_of(expected_), " was expected"));
  }
}

// Computes the MAC of a message.  The label separates roles and steps.  All parts have fixed sizes,
// so different conversations never produce the same input.
Digest Handshake::mac(MessageType type, std::span<const std::byte> body) const {
  HmacSha256 hmac(key_);
  hmac.update(as_bytes("r2ccl handshake "));
  hmac.update(as_bytes(name_of(type)));
  hmac.update(as_bytes("\n"));
  hmac.update(transcript_);
  hmac.update(body);
  return hmac.finish();
}

void Handshake::send(MessageType type, std::vector<std::byte> message) {
  put(std::span(message), at::magic, handshake_magic);
  put(std::span(message), at::version, handshake_version);
  put(std::span(message), at::frames, static_cast<std::uint16_t>(frame_version));
  put(std::span(message), at::type, static_cast<std::uint8_t>(type));
  const Digest tag = mac(type, message);
  message.insert(message.end(), tag.begin(), tag.end());
  remember(message);
  output_.insert(output_.end(), message.begin(), message.end());
}

bool Handshake::authentic(MessageType type, std::span<const std::byte> message) const {
  const std::size_t body = message.size() - mac_bytes;
  return equal_in_constant_time(mac(type, message.first(body)), message.subspan(body));
}

void Handshake::remember(std::span<const std::byte> message) {
  transcript_.insert(transcript_.end(), message.begin(), message.end());
}

void Handshake::derive_channel_key() {
  HmacSha256 hmac(key_);
  hmac.update(as_bytes("r2ccl channel\n"));
  hmac.update(transcript_);
  channel_key_ = hmac.finish();
}

void Handshake::establish() {
  state_ = HandshakeState::established;
  wipe(key_);
}

void Handshake::reject(HandshakeFault fault, std::string reason) {
  output_.clear();
  end(fault, std::move(reason));
}

void Handshake::end(HandshakeFault fault, std::string reason) {
  state_ = HandshakeState::rejected;
  fault_ = fault;
  reason_ = std::move(reason);
  input_.clear();
  wipe(key_);
}

void Handshake::reject_unauthentic(MessageType type) {
  reject(HandshakeFault::authentication,
         concat(name_of(type), " of process ",
                type == MessageType::hello || type == MessageType::auth ? hello_.connector
                                                                        : hello_.acceptor,
                " failed authentication (key of another job, or changed or replayed bytes)"));
}

ConnectorHandshake::ConnectorHandshake(const Hello& hello, const HandshakeKey& key, Inspect inspect)
    : inspect_(std::move(inspect)) {
  hello_ = hello;
  key_ = key;
  if (hello.acceptor >= hello.connector) {
    reject(HandshakeFault::identity, concat("process ", hello.connector, " must wait for process ",
                                            hello.acceptor, ": the lower process number accepts"));
    return;
  }
  std::vector<std::byte> message(hello_bytes - mac_bytes);
  put(std::span(message), at::detail, static_cast<std::uint8_t>(hello.kind));
  put(std::span(message), at::hello_connector, hello.connector);
  put(std::span(message), at::hello_acceptor, hello.acceptor);
  put(std::span(message), at::hello_job, hello.job);
  put(std::span(message), at::hello_rail, hello.rail);
  put(std::span(message), at::hello_last_fenced, hello.last_fenced);
  put(std::span(message), at::hello_config, hello.config);
  put_name(message, at::hello_host, hello.names.host);
  put_name(message, at::hello_port, hello.names.port);
  if (!fill_random(std::span(message).subspan(at::hello_nonce))) {
    reject(HandshakeFault::system, "getrandom() failed");
    return;
  }
  send(MessageType::hello, std::move(message));
  expect(MessageType::challenge, MessageType::refuse);
}

void ConnectorHandshake::on_message(MessageType type, std::span<const std::byte> message) {
  if (!authentic(type, message)) return reject_unauthentic(type);
  switch (type) {
    case MessageType::challenge: return on_challenge(message);
    case MessageType::refuse: return on_refuse(message);
    default: return establish();
  }
}

void ConnectorHandshake::on_challenge(std::span<const std::byte> message) {
  remember(message);
  epoch_ = get<std::uint32_t>(message, at::challenge_epoch);
  peer_last_fenced_ = get<std::uint32_t>(message, at::challenge_last_fenced);
  peer_names_ = {get_name(message, at::challenge_host), get_name(message, at::challenge_port)};
  if (epoch_ <= hello_.last_fenced || epoch_ <= peer_last_fenced_) {
    return reject(HandshakeFault::refused,
                  concat("process ", hello_.acceptor, " offers epoch ", epoch_,
                         ", which is fenced (last fenced here ", hello_.last_fenced, ", there ",
                         peer_last_fenced_, ")"));
  }
  if (inspect_) {
    if (const std::string why = inspect_(epoch_, peer_last_fenced_); !why.empty()) {
      return reject(HandshakeFault::refused, concat("epoch ", epoch_, " of process ",
                                                    hello_.acceptor, " is rejected: ", why));
    }
  }
  offered_epoch_ = epoch_;
  send(MessageType::auth, std::vector<std::byte>(proof_bytes - mac_bytes));
  derive_channel_key();
  expect(MessageType::ready);
}

void ConnectorHandshake::on_refuse(std::span<const std::byte> message) {
  const auto fault = static_cast<HandshakeFault>(get<std::uint8_t>(message, at::detail));
  if (fault == HandshakeFault::config) {
    return reject(fault, config_mismatch(hello_.acceptor, hello_.config,
                                         get<std::uint64_t>(message, at::refuse_config)));
  }
  peer_last_fenced_ = get<std::uint32_t>(message, at::refuse_last_fenced);
  reject(HandshakeFault::refused, concat("process ", hello_.acceptor, " refuses rail ", hello_.rail,
                                         " for now (the reason is in its log)"));
}

AcceptorHandshake::AcceptorHandshake(const Self& self, FindKey find_key, Decide decide)
    : self_(self), find_key_(std::move(find_key)), decide_(std::move(decide)) {
  expect(MessageType::hello);
}

void AcceptorHandshake::on_message(MessageType type, std::span<const std::byte> message) {
  if (type == MessageType::hello) return on_hello(message);
  on_auth(message);
}

void AcceptorHandshake::on_hello(std::span<const std::byte> message) {
  const unsigned kind = get<std::uint8_t>(message, at::detail);
  hello_.connector = get<std::uint32_t>(message, at::hello_connector);
  hello_.acceptor = get<std::uint32_t>(message, at::hello_acceptor);
  hello_.job = get<std::uint64_t>(message, at::hello_job);
  hello_.rail = get<std::uint16_t>(message, at::hello_rail);
  hello_.last_fenced = get<std::uint32_t>(message, at::hello_last_fenced);
  hello_.config = get<std::uint64_t>(message, at::hello_config);
  hello_.names = {get_name(message, at::hello_host), get_name(message, at::hello_port)};

  if (!is_connection_kind(kind)) {
    return reject(HandshakeFault::garbage, concat("unknown rail kind ", kind));
  }
  hello_.kind = static_cast<RailKind>(kind);
  if (hello_.job != self_.job) {
    return reject(HandshakeFault::identity,
                  "the peer belongs to job " + hex(hello_.job) + ", ours is " + hex(self_.job));
  }
  if (hello_.acceptor != self_.process || hello_.connector <= self_.process) {
    return reject(HandshakeFault::identity,
                  concat("process ", hello_.connector, " connects to process ", hello_.acceptor,
                         ", this is process ", self_.process));
  }
  std::optional<HandshakeKey> key = find_key_(hello_.connector);
  if (!key) {
    return reject(HandshakeFault::identity,
                  concat("process ", hello_.connector, " is not a peer of this process"));
  }
  key_ = *key;
  wipe(*key);
  if (!authentic(MessageType::hello, message)) return reject_unauthentic(MessageType::hello);

  // The HELLO is authentic, or a recording of an authentic HELLO.  The acceptor may send a refusal
  // from here on.
  remember(message);
  peer_last_fenced_ = hello_.last_fenced;
  peer_names_ = hello_.names;
  if (hello_.config != self_.config) {
    return refuse(HandshakeFault::config,
                  config_mismatch(hello_.connector, self_.config, hello_.config));
  }
  const Decision decision = decide_(hello_, /*fresh=*/false);
  if (const std::string why = objection(decision); !why.empty()) {
    return refuse(HandshakeFault::refused, why, decision.last_fenced);
  }
  epoch_ = decision.epoch;
  std::vector<std::byte> challenge(answer_bytes - mac_bytes);
  put(std::span(challenge), at::challenge_epoch, decision.epoch);
  put(std::span(challenge), at::challenge_last_fenced, decision.last_fenced);
  put_name(challenge, at::challenge_host, decision.names.host);
  put_name(challenge, at::challenge_port, decision.names.port);
  if (!fill_random(std::span(challenge).subspan(at::challenge_nonce))) {
    return reject(HandshakeFault::system, "getrandom() failed");
  }
  send(MessageType::challenge, std::move(challenge));
  expect(MessageType::auth);
}

void AcceptorHandshake::on_auth(std::span<const std::byte> message) {
  if (!authentic(MessageType::auth, message)) return reject_unauthentic(MessageType::auth);
  remember(message);
  const Decision decision = decide_(hello_, /*fresh=*/true);
  if (const std::string why = objection(decision); !why.empty()) {
    return reject(HandshakeFault::refused, why);
  }
  if (decision.epoch != epoch_) {
    return reject(
        HandshakeFault::refused,
        concat("the offer of epoch ", epoch_, " of rail ", hello_.rail, " to process ",
               hello_.connector, " is outdated; the epoch to offer is now ", decision.epoch));
  }
  derive_channel_key();
  send(MessageType::ready, std::vector<std::byte>(proof_bytes - mac_bytes));
  establish();
}

std::string AcceptorHandshake::objection(const Decision& decision) const {
  const std::string rail = concat("rail ", hello_.rail, " of process ", hello_.connector);
  if (!decision.accept) return rail + " is refused for now: " + decision.why;
  if (decision.epoch <= hello_.last_fenced || decision.epoch <= decision.last_fenced) {
    return concat(rail, ": epoch ", decision.epoch, " is fenced (last fenced there ",
                  hello_.last_fenced, ", here ", decision.last_fenced, ")");
  }
  return {};
}

void AcceptorHandshake::refuse(HandshakeFault fault, std::string reason,
                               std::uint32_t last_fenced) {
  std::vector<std::byte> message(answer_bytes - mac_bytes);
  put(std::span(message), at::detail, static_cast<std::uint8_t>(fault));
  if (fault == HandshakeFault::config) put(std::span(message), at::refuse_config, self_.config);
  put(std::span(message), at::refuse_last_fenced, last_fenced);
  send(MessageType::refuse, std::move(message));
  end(fault, std::move(reason));
}

}  // namespace r2ccl
