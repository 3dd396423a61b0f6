#include "engine/communicator.hpp"

#include <algorithm>
#include <numeric>

#include "collectives/collectives.hpp"
#include "engine/clock.hpp"
#include "plan/cost_model.hpp"

namespace r2ccl {
namespace {

constexpr unsigned rounds_per_check = 16;
constexpr int max_ranks = 256;  // CallTag::root is one byte

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::create(std::shared_ptr<Engine> engine,
                                                           std::uint64_t id, std::string name,
                                                           int rank,
                                                           const std::vector<Member>& members,
                                                           Simd simd) {
  if (members.empty() || members.size() > max_ranks || rank < 0 ||
      rank >= static_cast<int>(members.size()))
    return Status(ErrorCode::invalid_argument,
                  "rank " + std::to_string(rank) + " of " + std::to_string(members.size()) +
                      ": a communicator has 1 to 256 ranks, numbered from 0");
  std::unique_ptr<Communicator> made(
      new Communicator(std::move(engine), id, std::move(name), rank, simd));
  const Engine::Lock lock(*made->engine_);
  std::vector<int> nodes;
  for (std::size_t i = 0; i < members.size(); ++i) {
    nodes.push_back(members[i].node);
    Endpoint endpoint;
    if (static_cast<int>(i) != rank) {
      endpoint.peer = made->engine_->find(members[i].process);
      if (endpoint.peer == nullptr)
        return Status(ErrorCode::invalid_argument,
                      "rank " + std::to_string(i) + " of '" + made->name_ + "' is no peer");
      endpoint.out = &endpoint.peer->link.out_stream(id);
      endpoint.in = &endpoint.peer->link.in_stream(id);
      made->peers_.push_back(endpoint.peer);
    }
    made->members_.push_back(endpoint);
  }
  made->tree_ = ReductionTree::from_nodes(nodes);
  made->engine_->add_communicator(*made);
  return made;
}

Communicator::Communicator(std::shared_ptr<Engine> engine, std::uint64_t id, std::string name,
                           int rank, Simd simd)
    : engine_(std::move(engine)),
      id_(id),
      name_(std::move(name)),
      rank_(rank),
      simd_(simd),
      segment_bytes_(static_cast<std::size_t>(engine_->config().slot_bytes)) {}

Communicator::~Communicator() { close(0.0); }

void Communicator::close(double linger_s) {
  const std::lock_guard guard(call_mutex_);
  if (closed_) return;
  closed_ = true;
  Engine::Lock lock(*engine_);
  const TimeNs deadline = now_ns() + static_cast<TimeNs>(linger_s * 1e9);
  const auto delivered = [this] {
    return std::all_of(members_.begin(), members_.end(), [](const Endpoint& member) {
      return member.peer == nullptr || member.peer->link.dark() ||
             member.peer->link.peer_said_bye() || (member.out->idle() && !member.in->owes_ack());
    });
  };
  while (failed_ == ErrorCode::ok && now_ns() < deadline && !delivered()) {
    for (Peer* peer : peers_) engine_->progress(*peer, now_ns(), /*all_rails=*/true);
    engine_->tick_if_due(now_ns());
    if (!delivered()) engine_->block(lock, peers_);
  }
  for (const Endpoint& member : members_)  // a call that failed has dropped them already
    if (member.out != nullptr) engine_->drop_streams(*member.peer, id_);
  engine_->remove_communicator(*this);
}

// --- calls
// ----------------------------------------------------------------------------------------

CallTag Communicator::collective_tag(Collective collective, DType dtype, ReduceOp op,
                                     std::size_t count, int root) {
  return {.count = count,
          .number = calls_,
          .collective = collective,
          .dtype = dtype,
          .op = op,
          .root = static_cast<std::uint8_t>(root)};
}

template <typename Body>
Status Communicator::run(const CallTag& tag, std::size_t bytes, Body body) {
  if (closed_) return {ErrorCode::invalid_argument, "communicator '" + name_ + "' has been closed"};
  tag_ = tag;
  call_bytes_ = bytes;
  const Config& config = engine_->config();
  bulk_ =
      bytes > static_cast<std::size_t>(std::min(config.small_message_bytes, config.staging_bytes));
  stalled_ = 0;
  {
    const Engine::Lock lock(*engine_);
    if (failed_ != ErrorCode::ok) return failure();
    for (Endpoint& member : members_)
      if (member.peer != nullptr) member.call_position = member.out->posted_position();
  }
  return conclude(body());
}

Status Communicator::conclude(Status status) {
  if (stalled_ == 0 && status.ok()) return status;
  const Engine::Lock lock(*engine_);
  if (stalled_ > 0)
    engine_->journal_.record({.time_ns = now_ns(),
                              .kind = JournalKind::stall,
                              .rail = no_rail_entry,
                              .call = tag_.number,
                              .communicator = id_,
                              .value = static_cast<std::uint64_t>(stalled_),
                              .detail = call_bytes_});
  if (!status.ok()) {
    if (failed_ == ErrorCode::ok) fail(status.code(), status.message(), now_ns());
    // Nothing may read the caller's buffers after the return.
    for (Endpoint& member : members_) {
      if (member.peer == nullptr || member.out == nullptr) continue;
      engine_->drop_streams(*member.peer, id_);
      member.out = nullptr;
      member.in = nullptr;
    }
  }
  return status;
}

Status Communicator::all_reduce(const std::byte* in, std::byte* out, std::size_t count, DType dtype,
                                ReduceOp op, Algorithm algorithm) {
  if (op == ReduceOp::avg && dtype == DType::boolean)
    return {ErrorCode::invalid_argument, "op: avg is not defined for bool"};
  const std::lock_guard guard(call_mutex_);
  const std::size_t bytes = count * size_of(dtype);
  if (algorithm == Algorithm::automatic) algorithm = engine_->config().algorithm;
  if (algorithm == Algorithm::automatic) algorithm = choose_all_reduce(bytes, tree_.node_sizes);
  const Reducer reducer{dtype, op, tree_, simd_};
  const CallTag tag =
      collective_tag(Collective::all_reduce, dtype, op, count, static_cast<int>(algorithm));
  ++calls_;
  return run(tag, bytes, [&] {
    return algorithm == Algorithm::one_shot ? all_reduce_one_shot(*this, in, out, count, reducer)
                                            : all_reduce_two_shot(*this, in, out, count, reducer);
  });
}

Status Communicator::all_gatherv(const std::byte* in, std::byte* out,
                                 std::span<const std::size_t> counts, DType dtype) {
  R2CCL_TRY(check_counts("sizes", counts));
  const std::lock_guard guard(call_mutex_);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const CallTag tag = collective_tag(Collective::all_gather, dtype, ReduceOp::sum, total, 0);
  ++calls_;
  return run(tag, total * size_of(dtype),
             [&] { return r2ccl::all_gatherv(*this, in, out, counts, dtype); });
}

Status Communicator::reduce_scatterv(const std::byte* in, std::byte* out,
                                     std::span<const std::size_t> counts, DType dtype,
                                     ReduceOp op) {
  R2CCL_TRY(check_counts("sizes", counts));
  if (op == ReduceOp::avg && dtype == DType::boolean)
    return {ErrorCode::invalid_argument, "op: avg is not defined for bool"};
  const std::lock_guard guard(call_mutex_);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const Reducer reducer{dtype, op, tree_, simd_};
  const CallTag tag = collective_tag(Collective::reduce_scatter, dtype, op, total, 0);
  ++calls_;
  return run(tag, total * size_of(dtype),
             [&] { return r2ccl::reduce_scatterv(*this, in, out, counts, reducer); });
}

Status Communicator::broadcast(std::byte* data, std::size_t count, DType dtype, int root) {
  R2CCL_TRY(check_rank("root", root));
  const std::lock_guard guard(call_mutex_);
  const CallTag tag = collective_tag(Collective::broadcast, dtype, ReduceOp::sum, count, root);
  ++calls_;
  return run(tag, count * size_of(dtype),
             [&] { return r2ccl::broadcast(*this, data, count, dtype, root); });
}

Status Communicator::gather(const std::byte* in, std::byte* out,
                            std::span<const std::size_t> counts, DType dtype, int root) {
  R2CCL_TRY(check_rank("root", root));
  R2CCL_TRY(check_counts("sizes", counts));
  const std::lock_guard guard(call_mutex_);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const CallTag tag = collective_tag(Collective::gather, dtype, ReduceOp::sum, total, root);
  ++calls_;
  return run(tag, total * size_of(dtype),
             [&] { return r2ccl::gather(*this, in, out, counts, dtype, root); });
}

Status Communicator::all_to_allv(const std::byte* in, std::span<const std::size_t> in_counts,
                                 std::byte* out, std::span<const std::size_t> out_counts,
                                 DType dtype) {
  R2CCL_TRY(check_counts("in_sizes", in_counts));
  R2CCL_TRY(check_counts("out_sizes", out_counts));
  const std::lock_guard guard(call_mutex_);
  const std::size_t total = std::accumulate(in_counts.begin(), in_counts.end(), std::size_t{0});
  const CallTag tag = collective_tag(Collective::all_to_all, dtype, ReduceOp::sum, 0, 0);
  ++calls_;
  return run(tag, total * size_of(dtype),
             [&] { return r2ccl::all_to_allv(*this, in, in_counts, out, out_counts, dtype); });
}

Status Communicator::send_to(const std::byte* data, std::size_t count, DType dtype, int peer) {
  R2CCL_TRY(check_rank("dst", peer));
  if (peer == rank_) return {ErrorCode::invalid_argument, "dst: is this rank itself"};
  const std::lock_guard guard(call_mutex_);
  CallTag tag = collective_tag(Collective::send, dtype, ReduceOp::sum, count, 0);
  tag.number = members_[static_cast<std::size_t>(peer)].sends++;
  return run(tag, count * size_of(dtype),
             [&] { return r2ccl::send(*this, data, count, dtype, peer); });
}

Status Communicator::receive_from(std::byte* data, std::size_t count, DType dtype, int peer) {
  R2CCL_TRY(check_rank("src", peer));
  if (peer == rank_) return {ErrorCode::invalid_argument, "src: is this rank itself"};
  const std::lock_guard guard(call_mutex_);
  // What the peer's matching send() says.
  CallTag tag = collective_tag(Collective::send, dtype, ReduceOp::sum, count, 0);
  tag.number = members_[static_cast<std::size_t>(peer)].receives++;
  return run(tag, count * size_of(dtype),
             [&] { return r2ccl::recv(*this, data, count, dtype, peer); });
}

Status Communicator::barrier() {
  const std::lock_guard guard(call_mutex_);
  const CallTag tag = collective_tag(Collective::barrier, DType::u8, ReduceOp::sum, 0, 0);
  ++calls_;
  return run(tag, 0, [&] { return r2ccl::barrier(*this); });
}

// --- Channel
// ----------------------------------------------------------------------------------------

Status Communicator::send(int peer, std::span<const std::byte> data) {
  Endpoint& endpoint = members_[static_cast<std::size_t>(peer)];
  const Engine::Lock lock(*engine_);
  if (failed_ != ErrorCode::ok) return failure();
  const TimeNs now = now_ns();
  endpoint.peer->link.post(*endpoint.out, data, tag_, now);
  engine_->send(*endpoint.peer, now);
  return {};
}

Result<std::span<const std::byte>> Communicator::receive(int peer, std::size_t bytes) {
  Endpoint& endpoint = members_[static_cast<std::size_t>(peer)];
  Engine::Lock lock(*engine_);
  R2CCL_TRY(wait(endpoint, lock, [&] { return endpoint.in->front() != nullptr; }));
  const InMessage& message = *endpoint.in->front();
  if (message.tag != tag_ || message.bytes != bytes)
    return mismatch(peer, message.tag, message.bytes, bytes);
  return std::span<const std::byte>(endpoint.in->front_data(), bytes);
}

Status Communicator::release(int peer) {
  Endpoint& endpoint = members_[static_cast<std::size_t>(peer)];
  const Engine::Lock lock(*engine_);
  if (failed_ != ErrorCode::ok) return failure();
  const TimeNs now = now_ns();
  endpoint.peer->link.consume(*endpoint.in, now);
  engine_->send(*endpoint.peer, now);
  return {};
}

Status Communicator::settle(int peer, std::size_t bytes) {
  Endpoint& endpoint = members_[static_cast<std::size_t>(peer)];
  Engine::Lock lock(*engine_);
  return wait(endpoint, lock,
              [&] { return endpoint.out->settled_position() >= endpoint.call_position + bytes; });
}

Status Communicator::finish() {
  Engine::Lock lock(*engine_);
  for (Endpoint& endpoint : members_) {
    if (endpoint.peer == nullptr) continue;
    R2CCL_TRY(wait(endpoint, lock, [&] {
      return endpoint.out->settled_position() == endpoint.out->posted_position();
    }));
    if (!bulk_) continue;
    // A suspect rail may be in the middle of a frame that another one has delivered meanwhile.
    for (RailEnd& end : endpoint.peer->rails)
      if (end.framed && end.framed->wants_write()) end.framed->detach();
  }
  return {};
}

// --- waiting
// ----------------------------------------------------------------------------------------

template <typename Done>
Status Communicator::wait(Endpoint& endpoint, Engine::Lock& lock, Done done) {
  if (failed_ != ErrorCode::ok) return failure();
  if (done()) return {};
  Peer& peer = *endpoint.peer;
  const TimeNs spin = engine_->config().spin_us * 1000;
  const TimeNs began = now_ns();
  TimeNs last_arrival = began;
  std::uint64_t disturbances = peer.link.disturbances();
  for (unsigned round = 0;; ++round) {
    TimeNs now = now_ns();
    const bool check = round % rounds_per_check == rounds_per_check - 1;
    bool arrived = engine_->progress(peer, now, bulk_ || check);
    if (bulk_ || check) {
      for (Peer* other : peers_)
        if (other != &peer) engine_->progress(*other, now, /*all_rails=*/true);
      engine_->tick_if_due(now);
    }
    const bool finished = done();
    if (arrived || finished) {
      // The time since bytes last came counts as a stall if a rail event lies in it.
      if (disturbances != peer.link.disturbances()) {
        stalled_ += now - last_arrival;
        disturbances = peer.link.disturbances();
      }
      last_arrival = now;
    }
    if (failed_ != ErrorCode::ok) return failure();
    if (finished) return {};
    if (now - last_arrival < spin) {
      if (check) {
        R2CCL_TRY(check_liveness(peer, began, now));
        lock.yield();
      }
      continue;
    }
    R2CCL_TRY(check_liveness(peer, began, now));
    engine_->block(lock, bulk_ ? peers_ : std::vector<Peer*>{&peer});
  }
}

Status Communicator::check_liveness(const Peer& awaited, TimeNs waiting_since, TimeNs now) {
  if (awaited.link.peer_said_bye())
    return {ErrorCode::peer_closed, awaited.label + " has closed communicator '" + name_ +
                                        "' while rank " + std::to_string(rank_) + " waits in " +
                                        describe(tag_)};
  if (awaited.link.lost_bytes())
    return {ErrorCode::peer_lost,
            "a rail to " + awaited.label +
                " was lost and R2CCL_RESILIENCE is off: " + awaited.describe_rails()};
  // Not only the awaited one: it may be in no call and never learn that a third rank is lost.
  const auto timeout = static_cast<TimeNs>(engine_->config().link_timeout_s * 1e9);
  for (const Peer* peer : peers_) {
    if (!peer->link.dark() || peer->link.peer_said_bye()) continue;
    if (now - std::max(peer->link.dark_since(), waiting_since) < timeout) continue;
    return {ErrorCode::peer_lost,
            "no rail to " + peer->label +
                " for link_timeout_s = " + std::to_string(engine_->config().link_timeout_s) +
                " s in communicator '" + name_ + "', rank " + std::to_string(rank_) + ", " +
                describe(tag_) + ": " + peer->describe_rails()};
  }
  return {};
}

// --- failure
// ----------------------------------------------------------------------------------------

void Communicator::fail(ErrorCode code, const std::string& text, TimeNs now) {
  if (failed_ != ErrorCode::ok) return;
  failed_ = code;
  failure_text_ = text;
  engine_->log_.add(LogLevel::error, "communicator '" + name_ + "' failed: " + text);
  engine_->journal_.record({.time_ns = now,
                            .kind = JournalKind::abort,
                            .rail = no_rail_entry,
                            .call = tag_.number,
                            .communicator = id_,
                            .value = static_cast<std::uint64_t>(code)});
  // Everybody must learn of it, also those that have no business with the lost peer right now.
  for (Peer* peer : peers_) {
    peer->link.send_abort({id_, code, text});
    engine_->send(*peer, now);
  }
  if (engine_->blocked_ > 0) engine_->notify_blocked();
}

Status Communicator::failure() const { return {failed_, failure_text_}; }

Status Communicator::mismatch(int peer, const CallTag& theirs, std::size_t their_bytes,
                              std::size_t bytes) {
  std::string text = "communicator '" + name_ + "': " + label(peer) + " called " +
                     describe(theirs) + " where " + label(rank_) + " called " + describe(tag_);
  if (theirs == tag_)
    text += "; it sent " + std::to_string(their_bytes) + " bytes where " + std::to_string(bytes) +
            " were expected";
  return {ErrorCode::order_mismatch, std::move(text)};
}

Status Communicator::check_rank(const char* field, int value) const {
  if (value >= 0 && value < size()) return {};
  return {ErrorCode::invalid_argument, std::string(field) + ": " + std::to_string(value) +
                                           " is not a rank of 0 to " + std::to_string(size() - 1)};
}

Status Communicator::check_counts(const char* field, std::span<const std::size_t> counts) const {
  if (counts.size() == members_.size()) return {};
  return {ErrorCode::invalid_argument, std::string(field) + ": " + std::to_string(counts.size()) +
                                           " entries, one for each of " +
                                           std::to_string(members_.size()) + " ranks is needed"};
}

std::string Communicator::label(int rank) const { return "rank " + std::to_string(rank); }

}  // namespace r2ccl
