// Fuzz target: each end of a handshake against a peer with arbitrary bytes, and a real conversation
// with bytes changed on the way.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "allocated.hpp"
#include "base/sha256.hpp"
#include "connect/handshake.hpp"
#include "fuzz_main.hpp"
#include "link/frame.hpp"

namespace r2ccl::fuzz {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t mac_bytes = sizeof(Digest);
constexpr std::size_t hello_bytes = 156;
constexpr std::size_t answer_bytes = 132;
constexpr std::size_t proof_bytes = 44;
constexpr std::array<std::string_view, 6> labels{"",       "HELLO", "CHALLENGE",
                                                 "REFUSE", "AUTH",  "READY"};
constexpr std::array<std::size_t, 6> sizes{0,           hello_bytes, answer_bytes, answer_bytes,
                                           proof_bytes, proof_bytes};

HandshakeKey pair_key() {
  HandshakeKey key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(31 + i);
  return key;
}

Hello hello() {
  return {.connector = 5,
          .acceptor = 2,
          .job = 0x1122334455667788,
          .rail = 3,
          .kind = RailKind::tcp,
          .last_fenced = 6,
          .config = 0xfeedbeefcafef00d,
          .names = {"host-five", "eth5"}};
}

constexpr std::uint32_t offered_epoch = 8;

std::unique_ptr<AcceptorHandshake> acceptor() {
  return std::make_unique<AcceptorHandshake>(
      AcceptorHandshake::Self{
          .process = hello().acceptor, .job = hello().job, .config = hello().config},
      [](std::uint32_t process) -> std::optional<HandshakeKey> {
        if (process != hello().connector) return std::nullopt;
        return pair_key();
      },
      [](const Hello& from, bool /*fresh*/) {
        return Decision{.accept = from.rail != 9,
                        .epoch = offered_epoch,
                        .why = "",
                        .last_fenced = 7,
                        .names = {}};
      });
}

// Returns the MAC defined by the protocol, over all earlier messages and the body of this message.
Digest mac(std::uint8_t type, const Bytes& said, std::span<const std::byte> body) {
  HmacSha256 hmac(pair_key());
  for (const std::string_view text :
       {std::string_view("r2ccl handshake "), labels[type], std::string_view("\n")})
    hmac.update(std::as_bytes(std::span(text)));
  hmac.update(said);
  hmac.update(body);
  return hmac.finish();
}

bool authentic(std::uint8_t type, const Bytes& said, std::span<const std::byte> message) {
  const Digest right = mac(type, said, message.first(message.size() - mac_bytes));
  return std::equal(right.begin(), right.end(), message.end() - mac_bytes);
}

Bytes drain(Handshake& from) {
  Bytes bytes(from.output().begin(), from.output().end());
  from.sent(bytes.size());
  return bytes;
}

void append(Bytes& to, std::span<const std::byte> what) {
  to.insert(to.end(), what.begin(), what.end());
}

// ---- a single end, and a peer with or without the key ----

// Tracks the bytes fed to an end, and checks its answers and the transition to established.
class OneEnd {
 public:
  OneEnd(bool accepts, std::size_t baseline) : accepts_(accepts), baseline_(baseline) {
    if (accepts) {
      end_ = acceptor();
    } else {
      end_ = std::make_unique<ConnectorHandshake>(hello(), pair_key());
      said_ = drain(*end_);
    }
  }

  // Composes a message of the peer: fields from the input, and a MAC valid in most cases.
  Bytes compose(Input& input) {
    const std::uint8_t bits = input.byte();
    const std::uint8_t turn = accepts_ ? (told_.empty() ? 1 : 4) : (told_.empty() ? 2 : 5);
    const std::uint8_t type = bits < 192 ? turn : 1 + bits % 5;
    Bytes message(sizes[type] - mac_bytes);
    const auto put = [&message](std::size_t at, auto value) {
      std::memcpy(message.data() + at, &value, sizeof(value));
    };
    put(0, std::uint32_t{0x31483252});
    put(4, handshake_version);
    put(6, static_cast<std::uint16_t>(frame_version));
    put(8, type);
    if (type == 1) {
      put(12, hello().connector);
      put(16, hello().acceptor);
      put(20, hello().job);
      put(28, hello().rail);
      put(32, hello().last_fenced);
      put(36, hello().config);
    } else if (type == 2) {
      put(12, offered_epoch);
      put(16, std::uint32_t{7});
    }
    for (std::uint8_t edits = input.byte() & 3; edits > 0; --edits) {
      const std::size_t at = input.byte() % message.size();
      message[at] ^= static_cast<std::byte>(input.byte());
    }
    append(message, mac(type, said_, message));
    if ((bits & 31) == 31) message[input.byte() % message.size()] ^= static_cast<std::byte>(1);
    return message;
  }

  void feed(std::span<const std::byte> bytes) {
    const HandshakeState before = end_->state();
    append(told_, bytes);
    const HandshakeState state = end_->feed(bytes);
    require(state == end_->state(), "feed() returns the state");
    if (before == HandshakeState::rejected)
      require(state == before, "a rejected handshake stays rejected");
    judge();
    const std::size_t live = allocated_bytes();
    // Bytes after READY are kept for the reader of frames. Before READY, at most 1 message is kept.
    const bool done = state == HandshakeState::established;
    const std::size_t kept = 8192 + (done ? 2 * told_.size() : 0);
    require(live <= baseline_ + told_.capacity() + kept, "kept memory is bounded");
    require(end_->reason().size() < 300, "the reason is one line");
  }

  [[nodiscard]] HandshakeState state() const { return end_->state(); }

 private:
  void judge() {
    const Bytes answer = drain(*end_);
    const bool done = end_->state() == HandshakeState::established;
    if (accepts_) {
      const bool knows =
          told_.size() >= hello_bytes && authentic(1, {}, std::span(told_).first(hello_bytes));
      require(knows || (answer.empty() && !done), "an unauthenticated peer gets no answer");
      if (!answer.empty() && !done) {
        said_.assign(told_.begin(), told_.begin() + hello_bytes);
        append(said_, answer);
      }
      if (!done) return;
      const auto auth = std::span(told_).subspan(hello_bytes);
      require(auth.size() >= proof_bytes && authentic(4, said_, auth.first(proof_bytes)),
              "an acceptor is established only by a valid AUTH");
    } else {
      const std::span<const std::byte> told(told_);
      const bool offered =
          told.size() >= answer_bytes && authentic(2, said_, told.first(answer_bytes));
      if (!answered_)
        require(offered || (answer.empty() && !done), "no AUTH answers a forged offer");
      if (!answer.empty()) {
        append(said_, told.first(answer_bytes));
        append(said_, answer);
        answered_ = true;
      }
      if (!done) return;
      require(answered_ && told.size() >= answer_bytes + proof_bytes &&
                  authentic(5, said_, told.subspan(answer_bytes, proof_bytes)),
              "a connector is established only by a valid READY");
      require(end_->epoch() > end_->peer_last_fenced() && end_->epoch() > hello().last_fenced,
              "no fenced epoch begins");
    }
  }

  const bool accepts_;
  const std::size_t baseline_;
  std::unique_ptr<Handshake> end_;
  bool answered_ = false;
  Bytes said_;  // messages authenticated by both ends
  Bytes told_;
};

void strangers(Input& input, bool accepts, bool knows_key, std::size_t baseline) {
  OneEnd end(accepts, baseline);
  for (int i = 0; i < 64 && !input.empty(); ++i) {
    Bytes message;
    if (knows_key && (i % 2 == 0 || (input.byte() & 1) != 0))
      message = end.compose(input);
    else
      append(message, input.bytes(input.byte()));
    std::span<const std::byte> left(message);
    while (!left.empty()) {
      const std::uint8_t cut = input.byte();
      const std::size_t part = cut == 0 ? left.size() : std::min<std::size_t>(cut, left.size());
      end.feed(left.first(part));
      left = left.subspan(part);
    }
  }
}

// ---- a conversation with a man in the middle ----

// Bytes sent by an end, and bytes received by the other end.
struct Direction {
  Bytes said;
  Bytes heard;
  [[nodiscard]] bool unchanged(std::size_t bytes) const {
    return heard.size() >= bytes && said.size() >= bytes &&
           std::equal(heard.begin(), heard.begin() + static_cast<std::ptrdiff_t>(bytes),
                      said.begin());
  }
};

Bytes changed(Bytes bytes, Input& input) {
  const std::uint8_t how = input.byte();
  if (bytes.empty() || how < 96) return bytes;
  const auto at = static_cast<std::ptrdiff_t>(input.byte() % bytes.size());
  switch (how & 7) {
    case 0: bytes[static_cast<std::size_t>(at)] ^= static_cast<std::byte>(input.byte()); break;
    case 1: bytes.insert(bytes.begin() + at, static_cast<std::byte>(input.byte())); break;
    case 2: bytes.erase(bytes.begin() + at); break;
    case 3: bytes.resize(static_cast<std::size_t>(at)); break;
    case 4: append(bytes, Bytes(bytes)); break;
    case 5: append(bytes, input.bytes(input.byte())); break;
    case 6: std::reverse(bytes.begin() + at, bytes.end()); break;
    default: break;
  }
  return bytes;
}

void conversation(Input& input) {
  const auto accepting = acceptor();
  const auto connecting = std::make_unique<ConnectorHandshake>(hello(), pair_key());
  Direction there;
  Direction back;
  for (int i = 0; i < 64; ++i) {
    const bool to_acceptor = i % 2 == 0;
    Handshake& from = to_acceptor ? static_cast<Handshake&>(*connecting) : *accepting;
    Handshake& to = to_acceptor ? static_cast<Handshake&>(*accepting) : *connecting;
    Direction& direction = to_acceptor ? there : back;
    const Bytes message = drain(from);
    if (message.empty() && input.empty()) break;
    append(direction.said, message);
    const Bytes arrives = changed(message, input);
    append(direction.heard, arrives);
    std::span<const std::byte> left(arrives);
    while (!left.empty()) {
      const std::uint8_t cut = input.byte();
      const std::size_t part = cut == 0 ? left.size() : std::min<std::size_t>(cut, left.size());
      to.feed(left.first(part));
      left = left.subspan(part);
    }
  }
  if (accepting->state() == HandshakeState::established) {
    require(there.unchanged(hello_bytes + proof_bytes) && back.unchanged(answer_bytes),
            "an acceptor is established only by the original bytes");
    require(accepting->epoch() == offered_epoch && accepting->hello().rail == hello().rail &&
                accepting->peer_last_fenced() == hello().last_fenced,
            "an acceptor has the connector's fields");
    require(accepting->take_leftover().size() == there.heard.size() - hello_bytes - proof_bytes,
            "an acceptor keeps all bytes after the handshake");
  }
  if (connecting->state() != HandshakeState::established) return;
  require(accepting->state() == HandshakeState::established,
          "only an established acceptor sends READY");
  require(back.unchanged(answer_bytes + proof_bytes) && there.unchanged(hello_bytes + proof_bytes),
          "a connector is established only by the original bytes");
  require(connecting->epoch() == offered_epoch && connecting->offered_epoch() == offered_epoch &&
              connecting->peer_last_fenced() == 7,
          "a connector has the acceptor's fields");
  require(connecting->take_leftover().size() == back.heard.size() - answer_bytes - proof_bytes,
          "a connector keeps all bytes after the handshake");
}

}  // namespace

void run(Input& input, std::size_t baseline) {
  const std::uint8_t mode = input.byte();
  if (mode % 3 == 0)
    conversation(input);
  else
    strangers(input, mode % 3 == 1, (mode & 64) != 0, baseline);
}

}  // namespace r2ccl::fuzz
