#include "connect/handshake.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>

#include "link/frame.hpp"

namespace r2ccl {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::uint32_t acceptor_id = 2;
constexpr std::uint32_t connector_id = 5;
constexpr std::uint64_t job_id = 0x1122334455667788;
constexpr std::uint64_t config_hash = 0xfeedbeefcafef00d;

HandshakeKey key_of(int seed) {
  HandshakeKey key;
  for (std::size_t i = 0; i < key.size(); ++i) {
    key[i] = static_cast<std::byte>((static_cast<std::size_t>(seed) * 31 + i) & 0xff);
  }
  return key;
}

Hello good_hello() {
  return Hello{.connector = connector_id,
               .acceptor = acceptor_id,
               .job = job_id,
               .rail = 3,
               .kind = RailKind::tcp,
               .last_fenced = 6,
               .config = config_hash,
               .names = {"host-five", "eth5"}};
}

// An acceptor process: its keys, its decision, and the number of decisions requested.
struct World {
  std::map<std::uint32_t, HandshakeKey> keys = {{connector_id, key_of(1)}};
  AcceptorHandshake::Self self = {.process = acceptor_id, .job = job_id, .config = config_hash};
  Decision decision = {
      .accept = true, .epoch = 8, .why = {}, .last_fenced = 7, .names = {"host-two", "mlx5_2:1"}};
  int asked = 0;
  Hello seen;

  std::unique_ptr<AcceptorHandshake> acceptor() {
    return std::make_unique<AcceptorHandshake>(
        self,
        [this](std::uint32_t connector) -> std::optional<HandshakeKey> {
          const auto found = keys.find(connector);
          if (found == keys.end()) return std::nullopt;
          return found->second;
        },
        [this](const Hello& hello, bool /*fresh*/) {
          ++asked;
          seen = hello;
          return decision;
        });
  }
};

std::unique_ptr<ConnectorHandshake> connector(const Hello& hello = good_hello(), int key = 1) {
  return std::make_unique<ConnectorHandshake>(hello, key_of(key));
}

Bytes drain(Handshake& from) {
  Bytes bytes(from.output().begin(), from.output().end());
  from.sent(bytes.size());
  return bytes;
}

// All messages of an undisturbed handshake, in order. Messages 0 and 2 go to the acceptor.
struct Conversation {
  std::vector<Bytes> messages;
  HandshakeState connector_state;
  HandshakeState acceptor_state;
};

Conversation talk(Handshake& connecting, Handshake& accepting) {
  Conversation talk;
  for (bool to_acceptor = true;; to_acceptor = !to_acceptor) {
    Bytes message = drain(to_acceptor ? connecting : accepting);
    if (message.empty()) break;
    (to_acceptor ? accepting : connecting).feed(message);
    talk.messages.push_back(std::move(message));
  }
  talk.connector_state = connecting.state();
  talk.acceptor_state = accepting.state();
  return talk;
}

void expect_one_line(const std::string& reason) {
  EXPECT_FALSE(reason.empty());
  EXPECT_LT(reason.size(), 300U);
  for (const char c : reason) EXPECT_TRUE(c >= ' ' && c <= '~') << "in: " << reason;
}

// A connector and an acceptor. message_at(step) passes the first `step` messages and returns the
// next.
struct Pair {
  World world;
  std::unique_ptr<ConnectorHandshake> connecting = connector();
  std::unique_ptr<AcceptorHandshake> accepting = world.acceptor();

  Handshake& receiver(int step) {
    if (step % 2 == 0) return *accepting;
    return *connecting;
  }
  Handshake& sender(int step) { return receiver(step + 1); }

  Bytes message_at(int step) {
    for (int i = 0; i < step; ++i) receiver(i).feed(drain(sender(i)));
    return drain(sender(step));
  }
};

constexpr int steps = 4;

TEST(Handshake, EstablishesAConnection) {
  World world;
  auto connecting = connector();
  auto accepting = world.acceptor();
  const Conversation conversation = talk(*connecting, *accepting);
  EXPECT_EQ(conversation.messages.size(), static_cast<std::size_t>(steps));
  ASSERT_EQ(connecting->state(), HandshakeState::established) << connecting->reason();
  ASSERT_EQ(accepting->state(), HandshakeState::established) << accepting->reason();
  EXPECT_EQ(connecting->fault(), HandshakeFault::none);
  EXPECT_EQ(connecting->epoch(), 8U);
  EXPECT_EQ(accepting->epoch(), 8U);
  EXPECT_EQ(connecting->offered_epoch(), 8U);
  EXPECT_EQ(connecting->peer_last_fenced(), 7U);
  EXPECT_EQ(accepting->peer_last_fenced(), 6U);
  EXPECT_EQ(accepting->hello().connector, connector_id);
  EXPECT_EQ(accepting->hello().rail, 3);
  EXPECT_EQ(accepting->hello().kind, RailKind::tcp);
  EXPECT_EQ(accepting->peer_names().host, "host-five");
  EXPECT_EQ(accepting->peer_names().port, "eth5");
  EXPECT_EQ(connecting->peer_names().host, "host-two");
  EXPECT_EQ(connecting->peer_names().port, "mlx5_2:1");
  EXPECT_TRUE(connecting->take_leftover().empty());
}

TEST(Handshake, TheAcceptorReceivesExtremeFieldValues) {
  Hello hello = good_hello();
  hello.rail = 0xffff;
  hello.kind = RailKind::control;
  hello.connector = 0xffffffff;
  hello.last_fenced = 0xfffffffe;
  World world;
  world.keys[hello.connector] = key_of(1);
  world.decision.epoch = 0xffffffff;
  auto connecting = connector(hello);
  auto accepting = world.acceptor();
  talk(*connecting, *accepting);
  ASSERT_EQ(accepting->state(), HandshakeState::established) << accepting->reason();
  EXPECT_EQ(world.seen.rail, hello.rail);
  EXPECT_EQ(world.seen.kind, hello.kind);
  EXPECT_EQ(world.seen.connector, hello.connector);
  EXPECT_EQ(world.seen.last_fenced, hello.last_fenced);
  EXPECT_EQ(connecting->epoch(), 0xffffffff);
}

TEST(Handshake, AcceptsInputByteByByte) {
  Pair pair;
  for (int step = 0; step < steps; ++step) {
    const Bytes message = drain(pair.sender(step));
    for (std::size_t i = 0; i < message.size(); ++i) {
      ASSERT_TRUE(pair.sender(step + 1).output().empty()) << "answered before the message ended";
      pair.receiver(step).feed(std::span(message).subspan(i, 1));
    }
  }
  EXPECT_EQ(pair.connecting->state(), HandshakeState::established);
  EXPECT_EQ(pair.accepting->state(), HandshakeState::established);
}

TEST(Handshake, OutputMayBeSentInPieces) {
  Pair pair;
  for (int step = 0; step < steps; ++step) {
    while (!pair.sender(step).output().empty()) {
      const Bytes byte(pair.sender(step).output().begin(), pair.sender(step).output().begin() + 1);
      pair.sender(step).sent(1);
      pair.receiver(step).feed(byte);
    }
  }
  EXPECT_EQ(pair.connecting->state(), HandshakeState::established);
}

TEST(Handshake, MessagesHaveFixedSmallSizes) {
  for (int i = 0; i < 20; ++i) {
    Pair pair;
    const Conversation conversation = talk(*pair.connecting, *pair.accepting);
    EXPECT_EQ(conversation.messages[0].size(), 156U);
    EXPECT_EQ(conversation.messages[1].size(), 132U);
    EXPECT_EQ(conversation.messages[2].size(), 44U);
    EXPECT_EQ(conversation.messages[3].size(), 44U);
  }
}

TEST(Handshake, BytesAfterReadyAreReturned) {
  Pair pair;
  Bytes ready = pair.message_at(3);
  const Bytes frames = {std::byte{1}, std::byte{2}, std::byte{3}};
  ready.insert(ready.end(), frames.begin(), frames.end());
  ASSERT_EQ(pair.connecting->feed(ready), HandshakeState::established);
  EXPECT_EQ(pair.connecting->take_leftover(), frames);
  EXPECT_TRUE(pair.connecting->take_leftover().empty());
  // Both ends also keep bytes fed after the handshake.
  pair.connecting->feed(frames);
  pair.accepting->feed(frames);
  EXPECT_EQ(pair.connecting->take_leftover(), frames);
  EXPECT_EQ(pair.accepting->take_leftover(), frames);
}

TEST(Handshake, AnyFlippedBitIsRejected) {
  for (int step = 0; step < steps; ++step) {
    const std::size_t size = Pair().message_at(step).size();
    ASSERT_GT(size, 0U);
    for (std::size_t at = 0; at < size; ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        Pair pair;
        Bytes message = pair.message_at(step);
        message[at] ^= static_cast<std::byte>(1 << bit);
        ASSERT_EQ(pair.receiver(step).feed(message), HandshakeState::rejected)
            << "step " << step << " byte " << at << " bit " << bit;
        expect_one_line(pair.receiver(step).reason());
        ASSERT_TRUE(pair.receiver(step).output().empty()) << "step " << step << " byte " << at;
        ASSERT_NE(pair.receiver(step).fault(), HandshakeFault::config);
        // The intact message does not revive the handshake.
        message[at] ^= static_cast<std::byte>(1 << bit);
        ASSERT_EQ(pair.receiver(step).feed(message), HandshakeState::rejected);
      }
    }
  }
}

TEST(Handshake, ATruncatedMessageWaitsForTheTimeout) {
  for (int step = 0; step < steps; ++step) {
    const std::size_t size = Pair().message_at(step).size();
    for (std::size_t kept = 0; kept < size; ++kept) {
      Pair pair;
      const Bytes message = pair.message_at(step);
      ASSERT_EQ(pair.receiver(step).feed(std::span(message).first(kept)),
                HandshakeState::in_progress);
      ASSERT_TRUE(pair.receiver(step).output().empty());
      ASSERT_EQ(pair.receiver(step).abandon("timed out"), HandshakeState::rejected);
      EXPECT_EQ(pair.receiver(step).fault(), HandshakeFault::abandoned);
      EXPECT_NE(pair.receiver(step).reason().find("timed out with " + std::to_string(kept) +
                                                  " of " + std::to_string(size)),
                std::string::npos)
          << pair.receiver(step).reason();
    }
  }
}

TEST(Handshake, BytesOutOfTurnAreRejected) {
  for (int step = 0; step < steps - 1; ++step) {
    Pair pair;
    Bytes message = pair.message_at(step);
    message.push_back(std::byte{0});
    EXPECT_EQ(pair.receiver(step).feed(message), HandshakeState::rejected) << "step " << step;
    EXPECT_EQ(pair.receiver(step).fault(), HandshakeFault::garbage);
    EXPECT_TRUE(pair.receiver(step).output().empty()) << "step " << step;
  }
}

TEST(Handshake, GarbageIsRejectedEarlyAndUnanswered) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 2000; ++round) {
    Bytes garbage(1 + random() % 300);
    for (std::byte& b : garbage) b = static_cast<std::byte>(random() & 0xff);
    Pair pair;
    const int step = static_cast<int>(random() % steps);
    pair.message_at(step);
    Handshake& receiver = pair.receiver(step);
    receiver.feed(garbage);
    ASSERT_NE(receiver.state(), HandshakeState::established);
    ASSERT_TRUE(receiver.output().empty());
    if (garbage.size() >= 4) {
      ASSERT_EQ(receiver.state(), HandshakeState::rejected);
      expect_one_line(receiver.reason());
    }
  }
  World world;
  auto accepting = world.acceptor();
  const std::string_view http = "GET / HTTP/1.1\r\n";
  accepting->feed(std::as_bytes(std::span(http.data(), 1)));
  EXPECT_EQ(accepting->state(), HandshakeState::rejected);
  EXPECT_EQ(world.asked, 0);
}

// Valid header, random rest: the attack of a sender with knowledge of the protocol but not the key.
TEST(Handshake, WellFormedGarbageIsRejectedUnanswered) {
  std::mt19937_64 random(8);
  for (int round = 0; round < 2000; ++round) {
    Pair pair;
    const int step = static_cast<int>(random() % steps);
    Bytes message = pair.message_at(step);
    const std::size_t keep = 9 + random() % (message.size() - 9);
    for (std::size_t i = keep; i < message.size(); ++i) {
      message[i] ^= static_cast<std::byte>(1 + random() % 255);
    }
    const int asked = pair.world.asked;
    ASSERT_EQ(pair.receiver(step).feed(message), HandshakeState::rejected);
    ASSERT_TRUE(pair.receiver(step).output().empty());
    ASSERT_EQ(pair.world.asked, asked) << "decide was asked for an unauthenticated message";
    expect_one_line(pair.receiver(step).reason());
  }
}

TEST(Handshake, ReplayOfTheConnectorFails) {
  World world;
  auto connecting = connector();
  auto accepting = world.acceptor();
  const Conversation recorded = talk(*connecting, *accepting);
  ASSERT_EQ(recorded.acceptor_state, HandshakeState::established);

  auto victim = world.acceptor();
  EXPECT_EQ(victim->feed(recorded.messages[0]), HandshakeState::in_progress);
  const Bytes challenge = drain(*victim);
  EXPECT_NE(challenge, recorded.messages[1]) << "the acceptor's nonce is not fresh";
  EXPECT_EQ(victim->feed(recorded.messages[2]), HandshakeState::rejected);
  EXPECT_EQ(victim->fault(), HandshakeFault::authentication);
  EXPECT_TRUE(victim->output().empty());
}

TEST(Handshake, ReplayOfTheAcceptorFails) {
  World world;
  auto connecting = connector();
  auto accepting = world.acceptor();
  const Conversation recorded = talk(*connecting, *accepting);

  auto victim = connector();
  EXPECT_NE(drain(*victim), recorded.messages[0]) << "the connector's nonce is not fresh";
  EXPECT_EQ(victim->feed(recorded.messages[1]), HandshakeState::rejected);
  EXPECT_EQ(victim->fault(), HandshakeFault::authentication);
  EXPECT_TRUE(victim->output().empty());
  EXPECT_FALSE(victim->offered_epoch().has_value());
}

// Replays a READY message from an earlier handshake of the same pair.
TEST(Handshake, ReplayOfReadyFails) {
  World world;
  auto first = connector();
  auto first_acceptor = world.acceptor();
  const Conversation recorded = talk(*first, *first_acceptor);
  Pair pair;
  pair.message_at(3);
  EXPECT_EQ(pair.connecting->feed(recorded.messages[3]), HandshakeState::rejected);
  EXPECT_EQ(pair.connecting->fault(), HandshakeFault::authentication);
}

TEST(Handshake, AReflectedMessageIsRejected) {
  for (int step = 0; step < steps; ++step) {
    Pair pair;
    const Bytes message = pair.message_at(step);
    Handshake& sender = pair.sender(step);
    EXPECT_NE(sender.state(), HandshakeState::rejected);
    if (sender.state() == HandshakeState::established) continue;  // READY is the last message
    EXPECT_EQ(sender.feed(message), HandshakeState::rejected) << "step " << step;
  }
}

// An AUTH message relabelled as READY carries the same MAC. The MAC labels distinguish the roles.
TEST(Handshake, AuthDoesNotPassAsReady) {
  Pair pair;
  Bytes message = pair.message_at(2);
  const Bytes auth = message;
  message[8] = std::byte{5};
  EXPECT_EQ(pair.connecting->feed(message), HandshakeState::rejected);
  EXPECT_EQ(pair.connecting->fault(), HandshakeFault::authentication);
  EXPECT_EQ(pair.accepting->feed(auth), HandshakeState::established);
}

// A man in the middle joins two handshakes of the same pair.
TEST(Handshake, MessagesOfTwoConversationsDoNotMix) {
  for (int step = 1; step < steps; ++step) {
    Pair pair;
    Pair other;
    pair.message_at(step);
    const Bytes foreign = other.message_at(step);
    EXPECT_EQ(pair.receiver(step).feed(foreign), HandshakeState::rejected) << "step " << step;
    EXPECT_EQ(pair.receiver(step).fault(), HandshakeFault::authentication);
  }
}

struct Wrong {
  const char* what;
  std::function<void(Hello&)> change;
  HandshakeFault fault;
  const char* text;
};

TEST(Handshake, WrongHelloIsRejectedUnanswered) {
  const std::vector<Wrong> wrongs = {
      {"job", [](Hello& h) { h.job += 1; }, HandshakeFault::identity, "belongs to job"},
      {"unknown connector", [](Hello& h) { h.connector = 9; }, HandshakeFault::identity,
       "process 9 is not a peer of this process"},
      {"acceptor", [](Hello& h) { h.acceptor = 3; }, HandshakeFault::identity,
       "connects to process 3, this is process 2"},
      {"kind", [](Hello& h) { h.kind = RailKind::sim; }, HandshakeFault::garbage,
       "unknown rail kind 4"},
  };
  for (const Wrong& wrong : wrongs) {
    World world;
    Hello hello = good_hello();
    wrong.change(hello);
    auto connecting = connector(hello);
    auto accepting = world.acceptor();
    accepting->feed(drain(*connecting));
    EXPECT_EQ(accepting->state(), HandshakeState::rejected) << wrong.what;
    EXPECT_EQ(accepting->fault(), wrong.fault) << wrong.what;
    EXPECT_NE(accepting->reason().find(wrong.text), std::string::npos) << accepting->reason();
    EXPECT_TRUE(accepting->output().empty()) << wrong.what;
    EXPECT_EQ(world.asked, 0) << wrong.what;
  }
}

TEST(Handshake, WrongKeyIsRejectedUnanswered) {
  World world;
  auto connecting = connector(good_hello(), 2);
  auto accepting = world.acceptor();
  EXPECT_EQ(accepting->feed(drain(*connecting)), HandshakeState::rejected);
  EXPECT_EQ(accepting->fault(), HandshakeFault::authentication);
  EXPECT_NE(accepting->reason().find("process 5"), std::string::npos);
  EXPECT_TRUE(accepting->output().empty());
  EXPECT_EQ(world.asked, 0);
}

// The key of another pair in the same job is not valid for this pair.
TEST(Handshake, AnotherPairsKeyIsRejected) {
  const Digest secret = sha256({});
  World world;
  world.keys = {{connector_id, derive_pair_key(secret, job_id, connector_id, acceptor_id)},
                {7, derive_pair_key(secret, job_id, acceptor_id, 7)}};
  ConnectorHandshake impostor(good_hello(), world.keys.at(7));
  auto accepting = world.acceptor();
  EXPECT_EQ(accepting->feed(drain(impostor)), HandshakeState::rejected);
  ConnectorHandshake honest(good_hello(),
                            derive_pair_key(secret, job_id, acceptor_id, connector_id));
  auto next = world.acceptor();
  talk(honest, *next);
  EXPECT_EQ(next->state(), HandshakeState::established) << next->reason();
}

// The versions are the first bytes after the magic number, and are compared before the secret: a
// changed message has a wrong MAC, too.
TEST(Handshake, WrongVersionErrorNamesBothVersions) {
  const auto reason = [](int step, std::size_t at) {
    Pair pair;
    Bytes message = pair.message_at(step);
    message[at] = std::byte{0x34};
    message[at + 1] = std::byte{0x12};
    Handshake& receiver = pair.receiver(step);
    EXPECT_EQ(receiver.feed(std::span(message).first(at + 1)), HandshakeState::in_progress);
    EXPECT_EQ(receiver.feed(std::span(message).subspan(at + 1, 1)), HandshakeState::rejected);
    EXPECT_EQ(receiver.fault(), HandshakeFault::version);
    EXPECT_TRUE(receiver.output().empty());
    expect_one_line(receiver.reason());
    return receiver.reason();
  };
  for (int step = 0; step < steps; ++step) {
    EXPECT_EQ(reason(step, 4),
              "the peer runs another release of r2serve: its handshake has version 4660, ours " +
                  std::to_string(handshake_version));
    EXPECT_EQ(reason(step, 6),
              "the peer runs another release of r2serve: its frames have version 4660, ours " +
                  std::to_string(frame_version));
  }
}

TEST(Handshake, ALongOrUnprintableNameIsCutAndCleaned) {
  Pair pair;
  pair.world.decision.names = {std::string(40, 'x'), "eth\n0"};
  talk(*pair.connecting, *pair.accepting);
  EXPECT_EQ(pair.connecting->peer_names().host, std::string(max_name_bytes, 'x'));
  EXPECT_EQ(pair.connecting->peer_names().port, "eth?0");
}

TEST(Handshake, ConfigMismatchIsNamedOnBothSides) {
  World world;
  Hello hello = good_hello();
  hello.config = 0x10;
  auto connecting = connector(hello);
  auto accepting = world.acceptor();
  const Conversation conversation = talk(*connecting, *accepting);
  EXPECT_EQ(conversation.messages.size(), 2U);
  for (const Handshake* side :
       {static_cast<Handshake*>(connecting.get()), static_cast<Handshake*>(accepting.get())}) {
    EXPECT_EQ(side->state(), HandshakeState::rejected);
    EXPECT_EQ(side->fault(), HandshakeFault::config);
    EXPECT_NE(side->reason().find("slot_bytes, slots,"), std::string::npos) << side->reason();
    EXPECT_NE(side->reason().find("0000000000000010"), std::string::npos) << side->reason();
    EXPECT_NE(side->reason().find("feedbeefcafef00d"), std::string::npos) << side->reason();
  }
  EXPECT_EQ(world.asked, 0);
}

TEST(Handshake, RefusalIsAuthenticated) {
  Hello hello = good_hello();
  hello.config = 0x10;
  const auto refusal = [&](ConnectorHandshake& connecting) {
    World world;
    auto accepting = world.acceptor();
    accepting->feed(drain(connecting));
    return drain(*accepting);
  };
  const std::size_t size = refusal(*connector(hello)).size();
  EXPECT_EQ(size, 132U);
  for (std::size_t at = 0; at < size; ++at) {
    auto connecting = connector(hello);
    Bytes message = refusal(*connecting);
    message[at] ^= std::byte{0x20};
    EXPECT_EQ(connecting->feed(message), HandshakeState::rejected);
    EXPECT_NE(connecting->fault(), HandshakeFault::config) << "byte " << at;
  }
}

TEST(Handshake, AcceptorMayRefuseARail) {
  World world;
  world.decision = {
      .accept = false, .epoch = 0, .why = "epoch 7 is being fenced", .last_fenced = 6};
  auto connecting = connector();
  auto accepting = world.acceptor();
  talk(*connecting, *accepting);
  EXPECT_EQ(accepting->fault(), HandshakeFault::refused);
  EXPECT_NE(accepting->reason().find("rail 3 of process 5"), std::string::npos);
  EXPECT_NE(accepting->reason().find("epoch 7 is being fenced"), std::string::npos);
  EXPECT_EQ(connecting->fault(), HandshakeFault::refused);
  EXPECT_NE(connecting->reason().find("rail 3"), std::string::npos);
  EXPECT_FALSE(connecting->offered_epoch().has_value());
}

TEST(Handshake, FencedEpochIsNeverOffered) {
  for (const std::uint32_t last_fenced : {8U, 9U}) {
    World world;
    Hello hello = good_hello();
    hello.last_fenced = last_fenced;
    auto connecting = connector(hello);
    auto accepting = world.acceptor();
    talk(*connecting, *accepting);
    EXPECT_EQ(accepting->fault(), HandshakeFault::refused) << accepting->reason();
    EXPECT_EQ(connecting->fault(), HandshakeFault::refused);
    World forgetful;
    forgetful.decision.last_fenced = last_fenced;
    auto other = forgetful.acceptor();
    other->feed(drain(*connector()));
    EXPECT_EQ(other->fault(), HandshakeFault::refused) << other->reason();
  }
}

TEST(Handshake, ConnectorMayDeclineTheEpoch) {
  World world;
  std::uint32_t shown = 0;
  ConnectorHandshake connecting(good_hello(), key_of(1),
                                [&](std::uint32_t epoch, std::uint32_t peer_last_fenced) {
                                  shown = epoch;
                                  EXPECT_EQ(peer_last_fenced, 7U);
                                  return std::string("I have seen epoch 8");
                                });
  auto accepting = world.acceptor();
  talk(connecting, *accepting);
  EXPECT_EQ(shown, 8U);
  EXPECT_EQ(connecting.fault(), HandshakeFault::refused);
  EXPECT_NE(connecting.reason().find("I have seen epoch 8"), std::string::npos);
  EXPECT_FALSE(connecting.offered_epoch().has_value()) << "no AUTH was sent";
  EXPECT_EQ(accepting->state(), HandshakeState::in_progress);
}

// Two connections of the same rail: the second to authenticate must not open the same epoch.
TEST(Handshake, OutdatedOfferIsRejectedAtAuth) {
  World world;
  auto first = connector();
  auto second = connector();
  auto accept_first = world.acceptor();
  auto accept_second = world.acceptor();
  accept_first->feed(drain(*first));
  accept_second->feed(drain(*second));
  first->feed(drain(*accept_first));
  second->feed(drain(*accept_second));
  EXPECT_EQ(accept_first->feed(drain(*first)), HandshakeState::established);
  world.decision = {.accept = true, .epoch = 9, .why = {}, .last_fenced = 7};
  EXPECT_EQ(accept_second->feed(drain(*second)), HandshakeState::rejected);
  EXPECT_EQ(accept_second->fault(), HandshakeFault::refused);
  EXPECT_NE(accept_second->reason().find("outdated"), std::string::npos);
  EXPECT_TRUE(accept_second->output().empty());
  EXPECT_EQ(second->abandon("the peer closed the connection"), HandshakeState::rejected);
  EXPECT_EQ(second->offered_epoch(), 8U) << "the connector must know what to count as fenced";
}

TEST(Handshake, LowerProcessMustNotConnect) {
  Hello hello = good_hello();
  std::swap(hello.connector, hello.acceptor);
  auto connecting = connector(hello);
  EXPECT_EQ(connecting->state(), HandshakeState::rejected);
  EXPECT_EQ(connecting->fault(), HandshakeFault::identity);
  EXPECT_TRUE(connecting->output().empty());
  // An acceptor rejects a hello of a lower process, too.
  World world;
  world.self.process = connector_id;
  Bytes message = drain(*connector());
  for (std::size_t i = 12; i < 20; ++i) message[i] = std::byte{0};
  message[12] = std::byte{acceptor_id};
  message[16] = std::byte{connector_id};
  auto accepting = world.acceptor();
  EXPECT_EQ(accepting->feed(message), HandshakeState::rejected);
  EXPECT_EQ(accepting->fault(), HandshakeFault::identity);
}

TEST(Handshake, AbandonAfterTheEndChangesNothing) {
  Pair pair;
  talk(*pair.connecting, *pair.accepting);
  EXPECT_EQ(pair.connecting->abandon("timed out"), HandshakeState::established);
  auto connecting = connector(good_hello(), 2);
  World world;
  auto accepting = world.acceptor();
  accepting->feed(drain(*connecting));
  const std::string reason = accepting->reason();
  accepting->abandon("timed out");
  EXPECT_EQ(accepting->reason(), reason);
}

TEST(HandshakeKey, DependsOnSecretJobAndPairOnly) {
  const Digest secret = sha256({});
  const HandshakeKey key = derive_pair_key(secret, 1, 2, 3);
  EXPECT_EQ(key, derive_pair_key(secret, 1, 3, 2));
  EXPECT_NE(key, derive_pair_key(secret, 2, 2, 3));
  EXPECT_NE(key, derive_pair_key(secret, 1, 2, 4));
  EXPECT_NE(key, derive_pair_key(sha256(secret), 1, 2, 3));
}

TEST(ConfigFingerprint, DependsOnValuesAndTheirOrder) {
  const auto of = [](std::initializer_list<std::uint64_t> settings) {
    return config_fingerprint(std::vector<std::uint64_t>(settings));
  };
  EXPECT_EQ(of({1, 2}), of({1, 2}));
  EXPECT_NE(of({1, 2}), of({2, 1}));
  EXPECT_NE(of({1, 2}), of({1, 2, 0}));
}

TEST(ConfigFingerprint, DependsOnTheLimitsThatBothEndsShare) {
  const std::vector<std::uint64_t> settings{1, 2};
  const std::uint64_t own = config_fingerprint(settings);
  for (std::size_t i = 0; i < shared_limits.size(); ++i) {
    auto other = shared_limits;
    ++other[i];
    EXPECT_NE(config_fingerprint(settings, other), own) << i;
  }
}

}  // namespace
}  // namespace r2ccl
