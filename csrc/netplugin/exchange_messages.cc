#include "netplugin/exchange_messages.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <concepts>
#include <string_view>

#include "base/text.hpp"
#include "link/frame.hpp"

namespace r2ccl::net {
namespace {

constexpr std::uint32_t handle_magic = 0x314e3252;   // "R2N1"
constexpr std::uint32_t message_magic = 0x31583252;  // "R2X1"
// Versions of the exchange and of the frames that follow.
constexpr std::uint16_t exchange_version = 1;
constexpr std::size_t most_body_bytes = 4096;
constexpr std::size_t header_bytes = 12;
constexpr std::size_t most_text_bytes = 250;
constexpr std::size_t handle_dial_at = 120;

// ---- fields, little-endian ----

class Writer {
 public:
  template <std::unsigned_integral T>
  Writer& number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<std::byte>(value >> (8 * i) & 0xFFU));
    return *this;
  }
  Writer& bytes(std::span<const std::byte> add) {
    bytes_.insert(bytes_.end(), add.begin(), add.end());
    return *this;
  }
  Writer& text(std::string value) {
    cut(value, most_text_bytes);
    number(static_cast<std::uint8_t>(value.size()));
    return bytes(std::as_bytes(std::span(value)));
  }
  Writer& place(const Place& place) {
    number(static_cast<std::uint16_t>(place.address.family == AF_INET ? 4 : 6));
    number(place.port);
    return bytes(place.address.bytes);
  }
  Writer& rail(const RailListener& rail) {
    return place(rail.place).number(rail.prefix).number(rail.mbit_s);
  }
  [[nodiscard]] std::span<const std::byte> get() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <std::unsigned_integral T>
  void number(T& value) {
    std::uint64_t all = 0;
    const auto part = take(sizeof(T));
    for (std::size_t i = 0; i < part.size(); ++i)
      all |= std::to_integer<std::uint64_t>(part[i]) << (8 * i);
    value = static_cast<T>(all);
  }
  void bytes(std::span<std::byte> to) { std::ranges::copy(take(to.size()), to.begin()); }
  void text(std::string& value) {
    std::uint8_t size = 0;
    number(size);
    const auto part = take(size);
    value.assign(reinterpret_cast<const char*>(part.data()), part.size());
    std::ranges::replace_if(
        value, [](char c) { return c < ' ' || c > '~'; }, '?');
  }
  void place(Place& place) {
    std::uint16_t version = 0;
    number(version);
    number(place.port);
    bytes(place.address.bytes);
    place.address.family = version == 4 ? AF_INET : AF_INET6;
    if ((version != 4 && version != 6) || place.port == 0) good_ = false;
  }
  void rail(RailListener& rail) {
    place(rail.place);
    number(rail.prefix);
    number(rail.mbit_s);
    if (rail.prefix > (rail.place.address.family == AF_INET ? 32 : 128)) good_ = false;
  }
  [[nodiscard]] bool good() const { return good_; }
  [[nodiscard]] bool at_end() const { return good_ && bytes_.empty(); }

 private:
  std::span<const std::byte> take(std::size_t count) {
    if (count > bytes_.size()) good_ = false;
    if (!good_) return {};
    const auto part = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return part;
  }

  std::span<const std::byte> bytes_;
  bool good_ = true;
};

void put(Writer& to, const Description& own) {
  to.bytes(own.engine).number(own.process).text(own.host).bytes(own.node).text(own.shm);
  to.number(static_cast<std::uint16_t>(own.rails.size()));
  for (const RailListener& rail : own.rails) to.rail(rail);
}

void get(Reader& from, Description& peer) {
  from.bytes(peer.engine);
  from.number(peer.process);
  from.text(peer.host);
  from.bytes(peer.node);
  from.text(peer.shm);
  std::uint16_t count = 0;
  from.number(count);
  for (std::uint16_t i = 0; i < count && from.good(); ++i) from.rail(peer.rails.emplace_back());
}

void put(Writer& to, const std::optional<PairKey>& key) {
  to.number(static_cast<std::uint8_t>(key.has_value()));
  if (key) to.bytes(*key);
}

void get(Reader& from, std::optional<PairKey>& key) {
  std::uint8_t present = 0;
  from.number(present);
  if (present == 0) return;
  from.bytes(key.emplace());
}

Digest labelled(std::string_view label, const Secret& secret, std::span<const std::byte> key) {
  HmacSha256 hmac(key);
  hmac.update(std::as_bytes(std::span(label)));
  hmac.update(secret);
  return hmac.finish();
}

}  // namespace

// ---- secrets ----

Secret with_key(const Secret& secret, std::span<const std::byte> key) {
  if (key.empty()) return secret;
  const Digest digest = labelled("r2ccl plugin secret\n", secret, key);
  Secret made;
  std::copy_n(digest.begin(), made.size(), made.begin());
  return made;
}

std::uint32_t check_of_key(const Secret& secret, std::span<const std::byte> key) {
  if (key.empty()) return 0;
  std::uint32_t check = 0;
  Reader(labelled("r2ccl plugin check\n", secret, key)).number(check);
  return check;
}

// ---- handles ----

void write(const Handle& handle, std::span<std::byte> to) {
  Writer writer;
  writer.number(handle_magic).number(exchange_version).number(std::uint8_t{frame_version});
  writer.number(static_cast<std::uint8_t>(handle.places.size()));
  writer.number(handle.process).number(handle.key_check).number(handle.listener);
  writer.bytes(handle.secret);
  for (const Place& place : handle.places) writer.place(place);
  std::ranges::fill(to, std::byte{0});
  std::ranges::copy(writer.get(), to.begin());
  write_dial(handle.dial, to);
}

void write_dial(std::uint64_t dial, std::span<std::byte> handle) {
  Writer writer;
  writer.number(dial);
  std::ranges::copy(writer.get(), handle.subspan(handle_dial_at).begin());
}

Result<Handle> read_handle(std::span<const std::byte> from) {
  Handle handle;
  Reader reader(from);
  std::uint32_t magic = 0;
  std::uint16_t version = 0;
  std::uint8_t frames = 0;
  std::uint8_t places = 0;
  reader.number(magic);
  reader.number(version);
  reader.number(frames);
  reader.number(places);
  reader.number(handle.process);
  reader.number(handle.key_check);
  if (magic != handle_magic)
    return Status(ErrorCode::invalid_argument,
                  "the peer's handle is of another network: every rank needs this plugin "
                  "(NCCL_NET=r2ccl)");
  if (version != exchange_version || frames != frame_version)
    return Status(ErrorCode::invalid_argument,
                  "the peer's plugin has version " + std::to_string(version) + "." +
                      std::to_string(frames) + ", this plugin " + std::to_string(exchange_version) +
                      "." + std::to_string(frame_version) + ": must be equal on all ranks");
  reader.number(handle.listener);
  reader.bytes(handle.secret);
  handle.places.resize(std::min<std::size_t>(places, Handle::most_places));
  for (Place& place : handle.places) reader.place(place);
  if (!reader.good() || places == 0 || places > Handle::most_places)
    return Status(ErrorCode::invalid_argument, "the peer's handle is damaged");
  Reader(from.subspan(handle_dial_at)).number(handle.dial);
  return handle;
}

// ---- messages ----

void ExchangeEnd::fail(const std::string& why) {
  if (state_ != ExchangeState::in_progress) return;
  state_ = ExchangeState::failed;
  why_ = why;
}

void ExchangeEnd::sent(std::size_t bytes) {
  output_.erase(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(bytes));
}

Digest ExchangeEnd::mac(std::span<const std::byte> message) const {
  HmacSha256 hmac(secret_);
  hmac.update(transcript_);
  hmac.update(message);
  return hmac.finish();
}

void ExchangeEnd::send(Type type, std::span<const std::byte> body) {
  Writer message;
  message.number(message_magic).number(exchange_version);
  message.number(static_cast<std::uint16_t>(type)).number(static_cast<std::uint32_t>(body.size()));
  message.bytes(body);
  const Digest proof = mac(message.get());
  message.bytes(proof);
  const auto all = message.get();
  transcript_.insert(transcript_.end(), all.begin(), all.end());
  output_.insert(output_.end(), all.begin(), all.end());
}

void ExchangeEnd::feed(std::span<const std::byte> bytes) {
  input_.insert(input_.end(), bytes.begin(), bytes.end());
  while (state_ == ExchangeState::in_progress && take()) {
  }
}

// Takes a message.  Returns false if none is complete.
bool ExchangeEnd::take() {
  if (input_.size() < header_bytes) return false;
  Reader reader(input_);
  std::uint32_t magic = 0;
  std::uint32_t size = 0;
  std::uint16_t version = 0;
  std::uint16_t type = 0;
  reader.number(magic);
  reader.number(version);
  reader.number(type);
  reader.number(size);
  if (magic != message_magic || version != exchange_version || size > most_body_bytes) {
    fail("another protocol or version");
    return false;
  }
  const std::size_t signed_bytes = header_bytes + size;
  const std::size_t whole = signed_bytes + sizeof(Digest);
  if (input_.size() < whole) return false;
  const std::span<const std::byte> message(input_.data(), whole);
  const Digest proof = mac(message.first(signed_bytes));
  if (!equal_in_constant_time(proof, message.subspan(signed_bytes))) {
    fail("a message with a wrong secret: from a stranger, or R2CCL_SECRET_FILE differs");
    return false;
  }
  transcript_.insert(transcript_.end(), message.begin(), message.end());
  const std::vector<std::byte> body(message.begin() + header_bytes,
                                    message.begin() + static_cast<std::ptrdiff_t>(signed_bytes));
  input_.erase(input_.begin(), input_.begin() + static_cast<std::ptrdiff_t>(whole));
  on_message(static_cast<Type>(type), body);
  return true;
}

PairKey ExchangeEnd::padded(const PairKey& key, const Nonce& connector,
                            const Nonce& acceptor) const {
  HmacSha256 hmac(secret_);
  constexpr std::string_view label = "r2ccl plugin pad\n";
  hmac.update(std::as_bytes(std::span(label)));
  hmac.update(connector);
  hmac.update(acceptor);
  PairKey pad = hmac.finish();
  for (std::size_t i = 0; i < pad.size(); ++i) pad[i] ^= key[i];
  return pad;
}

// ---- connector ----

ExchangeConnector::ExchangeConnector(const Secret& secret, const Call& call,
                                     const std::array<std::byte, 16>& nonce)
    : ExchangeEnd(secret), nonce_(nonce) {
  Writer body;
  body.number(call.listener).number(call.connection).number(call.nic).number(call.process);
  body.bytes(nonce_);
  send(Type::call, body.get());
}

void ExchangeConnector::details(const Description& own, const std::optional<PairKey>& key) {
  Writer body;
  details_sent_ = true;
  put(body, own);
  put(body, key ? std::optional(padded(*key, nonce_, peer_nonce_)) : key);
  send(Type::details, body.get());
}

void ExchangeConnector::on_message(Type type, std::span<const std::byte> body) {
  Reader reader(body);
  if (type == Type::refuse) {
    std::string why;
    reader.text(why);
    refused_ = true;
    return fail("the peer refuses: " + why);
  }
  if (type == Type::answer && !answered_) {
    reader.bytes(peer_nonce_);
    get(reader, peer_);
    get(reader, peer_key_);
    if (!reader.at_end()) return fail("a damaged ANSWER");
    if (peer_key_) peer_key_ = padded(*peer_key_, nonce_, peer_nonce_);
    answered_ = true;
    return;
  }
  if (type == Type::done && details_sent_) return finish();
  fail("an unexpected message");
}

// ---- acceptor ----

void ExchangeAcceptor::answer(const Description& own, const std::optional<PairKey>& key) {
  wants_ = Wants::bytes;
  Writer body;
  body.bytes(nonce_);
  put(body, own);
  put(body, key ? std::optional(padded(*key, peer_nonce_, nonce_)) : key);
  send(Type::answer, body.get());
}

void ExchangeAcceptor::accept() {
  wants_ = Wants::bytes;
  send(Type::done, {});
  finish();
}

void ExchangeAcceptor::refuse(const std::string& why) {
  wants_ = Wants::bytes;
  Writer body;
  body.text(why);
  send(Type::refuse, body.get());
  fail("refused: " + why);
}

void ExchangeAcceptor::on_message(Type type, std::span<const std::byte> body) {
  Reader reader(body);
  if (type == Type::call && call_.connection == 0) {
    reader.number(call_.listener);
    reader.number(call_.connection);
    reader.number(call_.nic);
    reader.number(call_.process);
    reader.bytes(peer_nonce_);
    if (!reader.at_end() || call_.connection == 0) return fail("a damaged CALL");
    wants_ = Wants::answer;
    return;
  }
  if (type == Type::details && call_.connection != 0 && wants_ == Wants::bytes) {
    get(reader, peer_);
    get(reader, peer_key_);
    if (!reader.at_end() || peer_.process != call_.process) return fail("damaged DETAILS");
    if (peer_key_) peer_key_ = padded(*peer_key_, peer_nonce_, nonce_);
    wants_ = Wants::verdict;
    return;
  }
  fail("an unexpected message");
}

}  // namespace r2ccl::net
