#include "engine/communicator.hpp"

#include <algorithm>
#include <numeric>

#include "base/clock.hpp"
#include "collectives/collectives.hpp"
#include "link/device_memory.hpp"
#include "plan/cost_model.hpp"

namespace r2ccl {
namespace {

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
    Peer* peer = nullptr;
    if (static_cast<int>(i) != rank) {
      peer = made->engine_->find(members[i].process);
      if (peer == nullptr)
        return Status(ErrorCode::invalid_argument,
                      "rank " + std::to_string(i) + " of '" + made->name() + "' is no peer");
      made->others_.push_back(peer);
    }
    made->peers_.push_back(peer);
    made->add_member(peer == nullptr ? nullptr : &peer->link);
    if (peer != nullptr && !peer->link.streams_reachable(id))
      return Status(ErrorCode::internal, "memory for communicator '" + made->name() + "': " +
                                             made->engine_->verbs_devices_.pool().last_error());
  }
  made->sends_.resize(members.size());
  made->receives_.resize(members.size());
  made->tree_ = ReductionTree::from_nodes(nodes);
  made->group_ =
      made->engine_->journal_.add_group(made->name(), id, rank, static_cast<int>(members.size()));
  made->engine_->add_communicator(*made);
  return made;
}

Communicator::Communicator(std::shared_ptr<Engine> engine, std::uint64_t id, std::string name,
                           int rank, Simd simd)
    : LinkChannel(id, std::move(name), rank, static_cast<std::size_t>(engine->config().slot_bytes),
                  static_cast<TimeNs>(engine->config().link_timeout_s * 1e9)),
      engine_(std::move(engine)),
      simd_(simd) {}

Communicator::~Communicator() { close(0.0); }

void Communicator::abort(const std::string& text) {
  if (engine_->foreign()) return;
  const Engine::Lock lock(*engine_);
  if (!closed_) fail(ErrorCode::aborted, text);
}

Status Communicator::check_waiting(TimeNs since) const {
  const Engine::Lock lock(*engine_);
  if (failed()) return failure();
  for (int peer = 0; peer < size(); ++peer)
    if (peer_of(peer) != nullptr) R2CCL_TRY(check_liveness(peer, since));
  return {};
}

void Communicator::close(double linger_s) {
  if (engine_->foreign()) return;
  const std::lock_guard guard(call_mutex_);
  if (closed_) return;
  const Engine::Lock lock(*engine_);
  closed_ = true;
  linger(static_cast<TimeNs>(linger_s * 1e9), [this] { return failed() || all_delivered(); });
  leave();
  note_closed(group_);
  engine_->remove_communicator(*this);
}

// ---- calls ----

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
  return run_as(tag.collective, tag, bytes, std::move(body));
}

template <typename Body>
Status Communicator::run_as(Collective noted, const CallTag& tag, std::size_t bytes, Body body) {
  if (closed_)
    return {ErrorCode::invalid_argument, "communicator '" + name() + "' has been closed"};
  noted_ = noted;
  call_bytes_ = bytes;
  const Config& config = engine_->config();
  bulk_ =
      bytes > static_cast<std::size_t>(std::min(config.small_message_bytes, config.staging_bytes));
  stalled_ = 0;
  looked_ = now_ns();
  note_call_begins(group_, noted, looked_);
  Status status = bulk_ ? carry_out(tag, body) : carry_out_in_turn(tag, body);
  note_call_ends(group_, bytes, now_ns(), !status.ok());
  return status;
}

template <typename Body>
Status Communicator::carry_out_in_turn(const CallTag& tag, Body& body) {
  const Turn turn(*this);
  const InTurn marked(in_turn_);
  looked_ = now_ns();  // who had the turn before may have had it for long
  return carry_out(tag, body);
}

template <typename Body>
Status Communicator::carry_out(const CallTag& tag, Body& body) {
  R2CCL_TRY(begin(tag));
  return conclude(body());
}

Status Communicator::begin(const CallTag& tag) {
  const Turn turn(*this);
  return begin_call(tag);
}

Status Communicator::conclude(Status status) {
  if (stalled_ == 0 && status.ok() && scratch().empty()) return status;
  const Turn turn(*this);
  if (stalled_ > 0) {
    note_stall(group_, stalled_);
    engine_->journal_.record({.time_ns = now_ns(),
                              .kind = JournalKind::stall,
                              .from = static_cast<std::uint8_t>(noted_),
                              .rail = no_rail_entry,
                              .epoch = engine_->step_,
                              .call = tag().number,
                              .communicator = id(),
                              .value = static_cast<std::uint64_t>(stalled_),
                              .detail = call_bytes_});
    engine_->stalled_ns_ += static_cast<std::uint64_t>(stalled_);
  }
  return end_call(std::move(status));
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
  works_on(in, out);
  rendezvous_ = is_device_memory(out);
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
  works_on(data, data);
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
  works_on(in, out);
  return run(tag, total * size_of(dtype),
             [&] { return r2ccl::gather(*this, in, out, counts, dtype, root); });
}

Status Communicator::all_to_allv(const std::byte* in, std::span<const std::size_t> in_counts,
                                 std::byte* out, std::span<const std::size_t> out_counts,
                                 DType dtype) {
  R2CCL_TRY(check_counts("in_sizes", in_counts));
  R2CCL_TRY(check_counts("out_sizes", out_counts));
  const std::lock_guard guard(call_mutex_);
  const std::size_t total =
      std::max(std::accumulate(in_counts.begin(), in_counts.end(), std::size_t{0}),
               std::accumulate(out_counts.begin(), out_counts.end(), std::size_t{0}));
  const CallTag tag = collective_tag(Collective::all_to_all, dtype, ReduceOp::sum, 0, 0);
  ++calls_;
  works_on(in, out);
  rendezvous_ = is_device_memory(out);
  return run(tag, total * size_of(dtype),
             [&] { return r2ccl::all_to_allv(*this, in, in_counts, out, out_counts, dtype); });
}

Status Communicator::send_to(const std::byte* data, std::size_t count, DType dtype, int peer) {
  R2CCL_TRY(check_rank("dst", peer));
  if (peer == rank()) return {ErrorCode::invalid_argument, "dst: is this rank itself"};
  const std::lock_guard guard(call_mutex_);
  CallTag tag = collective_tag(Collective::send, dtype, ReduceOp::sum, count, 0);
  tag.number = sends_[static_cast<std::size_t>(peer)]++;
  works_on(data, data);
  return run(tag, count * size_of(dtype),
             [&] { return r2ccl::send(*this, data, count, dtype, peer); });
}

Status Communicator::receive_from(std::byte* data, std::size_t count, DType dtype, int peer) {
  R2CCL_TRY(check_rank("src", peer));
  if (peer == rank()) return {ErrorCode::invalid_argument, "src: is this rank itself"};
  const std::lock_guard guard(call_mutex_);
  // What the peer's matching send() says.
  CallTag tag = collective_tag(Collective::send, dtype, ReduceOp::sum, count, 0);
  tag.number = receives_[static_cast<std::size_t>(peer)]++;
  works_on(data, data);
  return run_as(Collective::recv, tag, count * size_of(dtype),
                [&] { return r2ccl::recv(*this, data, count, dtype, peer); });
}

Status Communicator::barrier() {
  const std::lock_guard guard(call_mutex_);
  const CallTag tag = collective_tag(Collective::barrier, DType::u8, ReduceOp::sum, 0, 0);
  ++calls_;
  return run(tag, 0, [&] { return r2ccl::barrier(*this); });
}

// ---- Channel ----

Status Communicator::send(int peer, std::span<const std::byte> data) {
  const Turn turn(*this);
  return LinkChannel::send(peer, data);
}

Status Communicator::expect(int peer, std::size_t skip, std::span<std::byte> memory) {
  // As offer_target() says, and without the lock.
  if (memory.size() <= static_cast<std::size_t>(engine_->config().small_message_bytes)) return {};
  const Turn turn(*this);
  return LinkChannel::expect(peer, skip, memory);
}

Result<std::span<const std::byte>> Communicator::receive(int peer, std::size_t bytes) {
  const Turn turn(*this);
  return LinkChannel::receive(peer, bytes);
}

Status Communicator::release(int peer) {
  const Turn turn(*this);
  return LinkChannel::release(peer);
}

Status Communicator::settle(int peer, std::size_t bytes) {
  const Turn turn(*this);
  return LinkChannel::settle(peer, bytes);
}

Status Communicator::finish() {
  const Turn turn(*this);
  return LinkChannel::finish();
}

// ---- LinkChannel ----

TimeNs Communicator::clock() const { return now_ns(); }

TimeNs Communicator::recently() const { return in_turn_ ? looked_ : now_ns(); }

void Communicator::flush(int peer, TimeNs now) { peer_of(peer)->send(now); }

bool Communicator::detach(int peer, const DetachScope& scope) {
  return peer_of(peer)->detach(scope, now_ns());
}

std::string Communicator::describe_peer(int peer) const { return peer_of(peer)->label; }

std::string Communicator::describe_rails(int peer) const { return peer_of(peer)->describe_rails(); }

void Communicator::on_failed(ErrorCode code, const std::string& text) {
  engine_->log_.add(LogLevel::error, "communicator '" + name() + "' failed: " + text);
  engine_->journal_.record({.time_ns = now_ns(),
                            .kind = JournalKind::abort,
                            .rail = no_rail_entry,
                            .call = tag().number,
                            .communicator = id(),
                            .value = static_cast<std::uint64_t>(code)});
  if (engine_->blocked_ > 0) engine_->notify_blocked();
}

// ---- arguments ----

Status Communicator::check_direct() const {
  if (tree_.node_sizes.size() != peers_.size())
    return {ErrorCode::invalid_argument, "several ranks are on one node"};
  std::vector<std::uint32_t> processes;
  for (const Peer* peer : others_) processes.push_back(peer->process);
  return engine_->check_reach(processes);
}

std::vector<Epoch> Communicator::rdma_epochs() const {
  const Engine::Lock lock(*engine_);
  std::vector<Epoch> epochs;
  for (const Peer* peer : others_)
    for (RailId rail = 0; rail < peer->link.rail_count(); ++rail)
      if (peer->link.kind(rail) == RailKind::verbs)
        epochs.push_back(peer->link.connected(rail) ? peer->link.epoch(rail) : 0);
  return epochs;
}

Status Communicator::check_rank(const char* field, int value) const {
  if (value >= 0 && value < size()) return {};
  return {ErrorCode::invalid_argument, std::string(field) + ": " + std::to_string(value) +
                                           " is not a rank of 0 to " + std::to_string(size() - 1)};
}

Status Communicator::check_counts(const char* field, std::span<const std::size_t> counts) const {
  if (static_cast<int>(counts.size()) == size()) return {};
  return {ErrorCode::invalid_argument, std::string(field) + ": " + std::to_string(counts.size()) +
                                           " entries, one for each of " + std::to_string(size()) +
                                           " ranks is needed"};
}

}  // namespace r2ccl
