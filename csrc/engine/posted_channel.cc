#include "engine/posted_channel.hpp"

#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.hpp"

namespace r2ccl {
namespace {

// Every call reads the rails where frames of the connection are likely; each 16th reads all rails
// and checks deadlines.
constexpr unsigned calls_per_check = 16;
constexpr double destructor_limit_s = 2.0;

}  // namespace

PostedChannel::PostedChannel(std::shared_ptr<Engine> engine, Peer& peer, ConnectionId id)
    : engine_(std::move(engine)), peer_(&peer), id_(id) {
  engine_->posted_channels_[{peer.process, id}] = this;
}

PostedChannel::~PostedChannel() = default;

Result<Peer*> PostedChannel::find(Engine& engine, std::uint32_t process, ConnectionId id) {
  R2CCL_TRY(engine.check_origin());
  Peer* const peer = engine.find(process);
  if (peer == nullptr || !peer->posted)
    return Status(ErrorCode::invalid_argument,
                  "process " + std::to_string(process) + " is no peer for posted messages");
  if (engine.posted_channels_.contains({process, id}))
    return Status(ErrorCode::invalid_argument,
                  "connection " + std::to_string(id) + " to " + peer->label + " is open already");
  return peer;
}

Status PostedChannel::failure() const {
  if (failed_ == ErrorCode::ok) return {};
  return {failed_, why_};
}

void PostedChannel::fail(ErrorCode code, const std::string& text) {
  fail_here(code, text, /*tell_peer=*/true);
}

void PostedChannel::on_abort(const AbortNotice& notice) {
  fail_here(notice.code, peer_->label + ": " + notice.text, /*tell_peer=*/false);
}

void PostedChannel::fail_here(ErrorCode code, const std::string& text, bool tell_peer) {
  if (failed_ != ErrorCode::ok) return;
  failed_ = code;
  why_ = text;
  // A late question ends an idle connection that is about to be closed here, too: no news.
  const bool idle = !tell_peer && code == ErrorCode::peer_closed && unfinished_ == 0;
  if (!idle)
    engine_->log_.add(LogLevel::error,
                      "a connection with " + peer_->label + " has failed: " + why_);
  if (!tell_peer) return;
  peer_->link.send_abort({id_, code, text});
  peer_->send(now_ns());
}

void PostedChannel::advance(RailId likely, TimeNs now) {
  const bool everywhere = ++rounds_ % calls_per_check == 0 || peer_->link.rail_count() <= 2;
  if (!everywhere && likely != any_rail && likely != peer_->link.inbound_rail() &&
      peer_->ends[likely].rail)
    (void)peer_->ends[likely].rail->pump_in(now);
  (void)engine_->progress(*peer_, now, everywhere);
  if (rounds_ % calls_per_check == 0) engine_->tick_if_due(now);
}

Status PostedChannel::check(TimeNs now) {
  const Link& link = peer_->link;
  const auto timeout = static_cast<TimeNs>(engine_->config().link_timeout_s * 1e9);
  if (engine_->closed_)
    fail(ErrorCode::aborted, "the engine is closed");
  else if (link.peer_closed())
    fail(ErrorCode::peer_closed, peer_->label + " has ended");
  else if (link.lost_bytes())
    fail(ErrorCode::peer_lost,
         "a rail to " + peer_->label +
             " was lost and R2CCL_RESILIENCE is off: " + peer_->describe_rails());
  else if (link.peer_gone())
    fail(ErrorCode::peer_lost,
         "the process has ended: " + peer_->label + ": " + peer_->describe_rails());
  else if (link.has_no_rail() && now - link.no_rail_since() >= timeout)
    fail(ErrorCode::peer_lost,
         "no rail within the link timeout to " + peer_->label + ": " + peer_->describe_rails());
  else if (link.unheard() >= unheard_timeouts * timeout)
    fail(ErrorCode::peer_lost, "no frame within ten link timeouts from the process of " +
                                   peer_->label + ": " + peer_->describe_rails());
  return failure();
}

Status PostedChannel::close(double limit_s) {
  if (std::exchange(closed_, true) || engine_->foreign()) return {};
  const TimeNs deadline = now_ns() + static_cast<TimeNs>(limit_s * 1e9);
  engine_->lock();
  if (!engine_->closed_ && (unfinished_ > 0 || awaited()))
    fail(ErrorCode::aborted, "the connection was closed with messages under way");
  bool released = release(now_ns());
  while (!released && now_ns() < deadline) {
    engine_->unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    engine_->lock();
    (void)engine_->progress(*peer_, now_ns(), /*all_rails=*/true);
    engine_->tick_if_due(now_ns());
    released = release(now_ns());
  }
  engine_->posted_channels_.erase({peer_->process, id_});
  engine_->unlock();
  if (released) return {};
  return {ErrorCode::internal, "a rail to " + peer_->label + " was not fenced within " +
                                   std::to_string(limit_s) + " s: " + peer_->describe_rails()};
}

// ---- sender ----

Result<std::unique_ptr<PostedSender>> PostedSender::open(const std::shared_ptr<Engine>& engine,
                                                         std::uint32_t process, ConnectionId id) {
  const Engine::Lock guard(*engine);
  auto peer = find(*engine, process, id);
  if (!peer.ok()) return peer.take_status();
  peer.value()->link.posted().open_sends(id);
  return std::unique_ptr<PostedSender>(new PostedSender(engine, *peer.value(), id));
}

PostedSender::~PostedSender() { (void)close(destructor_limit_s); }

Result<std::optional<std::uint64_t>> PostedSender::send(std::span<const std::byte> source) {
  using Number = std::optional<std::uint64_t>;
  R2CCL_TRY(engine_->check_origin());
  const Turn turn(*engine_);
  if (!turn.held()) return Number();
  R2CCL_TRY(failure());
  const TimeNs now = now_ns();
  Number number = posted().send(id_, source, now);
  if (!number) {
    advance(any_rail, now);
    const auto room = posted().room(id_);
    if (room && source.size() > *room)
      fail(ErrorCode::invalid_argument, "a message of " + std::to_string(source.size()) +
                                            " bytes is larger than its receive of " +
                                            std::to_string(*room));
    R2CCL_TRY(check(now));
    number = posted().send(id_, source, now);
  }
  if (number) {
    ++unfinished_;
    peer_->send(now);
  }
  return number;
}

bool PostedSender::finish(std::uint64_t number, TimeNs now) {
  SendState state = posted().send_state(id_, number);
  const DetachScope scope{.communicator = id_, .before = number + 1, .type = FrameType::put};
  if (state == SendState::detach && peer_->detach(scope, now)) state = SendState::done;
  if (state != SendState::done) return false;
  posted().take_sent(id_, number);
  --unfinished_;
  return true;
}

Result<bool> PostedSender::sent(std::uint64_t number) {
  R2CCL_TRY(engine_->check_origin());
  const Turn turn(*engine_);
  if (!turn.held()) return false;
  const TimeNs now = now_ns();
  if (is_open() && finish(number, now)) return true;
  R2CCL_TRY(failure());
  advance(any_rail, now);
  if (finish(number, now)) return true;
  R2CCL_TRY(check(now));
  return false;
}

Status PostedSender::withdraw(std::span<const std::byte> memory) {
  R2CCL_TRY(engine_->check_origin());
  bool used = false;
  {
    const Engine::Lock guard(*engine_);
    used = posted().uses(id_, memory);
  }
  return used ? close(destructor_limit_s) : Status();
}

bool PostedSender::release(TimeNs now) {
  return posted().close_sends(id_, now) &&
         peer_->detach({.communicator = id_, .before = {}, .type = FrameType::put}, now);
}

// ---- receiver ----

Result<std::unique_ptr<PostedReceiver>> PostedReceiver::open(const std::shared_ptr<Engine>& engine,
                                                             std::uint32_t process,
                                                             ConnectionId id) {
  const Engine::Lock guard(*engine);
  auto peer = find(*engine, process, id);
  if (!peer.ok()) return peer.take_status();
  peer.value()->link.posted().open_receives(id);
  return std::unique_ptr<PostedReceiver>(new PostedReceiver(engine, *peer.value(), id));
}

PostedReceiver::~PostedReceiver() { (void)close(destructor_limit_s); }

Result<MemoryId> PostedReceiver::add_memory(std::span<std::byte> memory) {
  R2CCL_TRY(engine_->check_origin());
  const Engine::Lock guard(*engine_);
  return posted().add_memory(memory);
}

Status PostedReceiver::remove_memory(MemoryId id) {
  R2CCL_TRY(engine_->check_origin());
  bool used = false;
  {
    const Engine::Lock guard(*engine_);
    used = posted().uses(id_, id);
  }
  if (used) R2CCL_TRY(close(destructor_limit_s));
  const Engine::Lock guard(*engine_);
  posted().remove_memory(id);
  return {};
}

Result<std::optional<std::uint64_t>> PostedReceiver::receive(const PostedMemory& into) {
  using Number = std::optional<std::uint64_t>;
  R2CCL_TRY(engine_->check_origin());
  const Turn turn(*engine_);
  if (!turn.held()) return Number();
  const TimeNs now = now_ns();
  Status state = failure();
  if (state.ok()) state = check(now);
  // Messages that have arrived are taken first: the error would end their user.
  if (!state.ok() && is_open() && posted().holds_message(id_)) return Number();
  if (!state.ok()) return state;
  const Number number = posted().receive(id_, into);
  if (!number) return number;
  home_ = into.home;
  ++unfinished_;
  peer_->send(now);
  return number;
}

std::optional<std::uint32_t> PostedReceiver::finish(std::uint64_t number) {
  const auto bytes = posted().received(id_, number);
  if (!bytes) return std::nullopt;
  posted().take_received(id_, number);
  --unfinished_;
  return bytes;
}

Result<std::optional<std::uint32_t>> PostedReceiver::received(std::uint64_t number) {
  using Bytes = std::optional<std::uint32_t>;
  R2CCL_TRY(engine_->check_origin());
  const Turn turn(*engine_);
  if (!turn.held()) return Bytes();
  const TimeNs now = now_ns();
  Bytes bytes = is_open() ? finish(number) : Bytes();
  if (bytes) return bytes;
  R2CCL_TRY(failure());
  advance(home_, now);
  bytes = finish(number);
  if (!bytes) R2CCL_TRY(check(now));
  return bytes;
}

bool PostedReceiver::release(TimeNs now) { return posted().close_receives(id_, now); }

}  // namespace r2ccl
