#include "engine/communicator.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.hpp"
#include "base/first_number.hpp"
#include "base/limits.hpp"
#include "base/sites.hpp"
#include "collectives/collectives.hpp"
#include "link/device_memory.hpp"

namespace r2ccl {

Result<std::unique_ptr<Communicator>> Communicator::create(std::shared_ptr<Engine> engine,
                                                           std::uint64_t id, std::string name,
                                                           int rank,
                                                           const std::vector<Member>& members,
                                                           Simd simd) {
  if (members.empty() || members.size() > max_ranks || rank < 0 ||
      rank >= static_cast<int>(members.size()))
    return Status(ErrorCode::invalid_argument,
                  "rank " + std::to_string(rank) + " of " + std::to_string(members.size()) +
                      ": a communicator has 1 to " + std::to_string(max_ranks) +
                      " ranks, numbered from 0");
  R2CCL_TRY(engine->check_origin());
  std::unique_ptr<Communicator> made(
      new Communicator(std::move(engine), id, std::move(name), rank, simd));
  const Engine::Lock lock(*made->engine_);
  R2CCL_TRY(made->engine_->check_new_channel(id, made->name()));
  std::vector<int> nodes;
  for (std::size_t i = 0; i < members.size(); ++i) {
    nodes.push_back(members[i].node);
    Peer* peer = nullptr;
    if (static_cast<int>(i) != rank) {
      peer = made->engine_->find(members[i].process);
      if (peer == nullptr)
        return Status(ErrorCode::invalid_argument,
                      "rank " + std::to_string(i) + " of '" + made->name() + "' is no peer");
    }
    made->channel_->add_peer(peer);
    if (peer != nullptr && !peer->link.streams_reachable(id))
      return Status(ErrorCode::internal, "memory for communicator '" + made->name() + "': " +
                                             made->engine_->verbs_devices_.pool().last_error());
  }
  made->calls_ = static_cast<std::uint32_t>(first_number());
  made->sends_.resize(members.size(), made->calls_);
  made->receives_.resize(members.size(), made->calls_);
  made->tree_ = ReductionTree::from_nodes(nodes);
  made->channel_->set_nodes(made->tree_.node_of_rank());
  made->channel_->open();
  return made;
}

Communicator::Communicator(std::shared_ptr<Engine> engine, std::uint64_t id, std::string name,
                           int rank, Simd simd)
    : engine_(std::move(engine)),
      simd_(simd),
      channel_(std::make_unique<EngineChannel>(*engine_, id, std::move(name), rank)) {}

Communicator::~Communicator() {
  if (origin_.foreign()) {
    (void)channel_.release();  // the journal and the links are the parent's
    return;
  }
  const Engine::Lock lock(*engine_);
  // Peers may still need what this communicator has sent.
  if (!closed_) engine_->deliver_later(std::move(channel_));
}

void Communicator::abort(const std::string& text) {
  if (origin_.foreign()) return;
  const Engine::Lock lock(*engine_);
  if (!closed_) channel_->fail(ErrorCode::aborted, text);
}

Status Communicator::check_waiting(TimeNs since) const {
  R2CCL_TRY(check_origin());
  const Engine::Lock lock(*engine_);
  return channel_->check_waiting(since);
}

void Communicator::close(double linger_s) {
  if (origin_.foreign()) return;
  const std::lock_guard guard(call_mutex_);
  if (closed_) return;
  const Engine::Lock lock(*engine_);
  closed_ = true;
  channel_->close(static_cast<TimeNs>(linger_s * 1e9));
}

// ---- calls ----

CallTag Communicator::rooted_tag(Collective collective, DType dtype, std::size_t count, int root) {
  const std::uint16_t call = next_call(std::exchange(capture_, std::uint16_t{0}));
  return {.count = count,
          .number = calls_++,
          .step = step_,
          .call = call,
          .root = static_cast<std::uint16_t>(root),
          .collective = collective,
          .dtype = dtype};
}

// A replay of a graph repeats a captured call in many steps, so its number does not depend on the
// step.
std::uint16_t Communicator::next_call(std::uint16_t capture) {
  constexpr std::uint64_t prime = 0x100000001b3;  // FNV-1
  const std::uint16_t call = step_ == 0 ? std::uint16_t{0} : step_calls_++;
  if (capture == 0) return call & most_captures;
  if (step_ != 0) step_captures_ = (step_captures_ ^ capture) * prime;
  return capture | captured_call;
}

void Communicator::count_call(std::uint16_t capture) {
  const std::lock_guard guard(call_mutex_);
  (void)next_call(captures_compared_ ? capture : std::uint16_t{0});
}

CallTag Communicator::flat_tag(Collective collective, DType dtype, ReduceOp op, std::size_t count) {
  CallTag tag = rooted_tag(collective, dtype, count, 0);
  tag.op = op;
  if (consensus() >= Consensus::site) tag.site = take_site();
  return tag;
}

// The tag of a send equals the tag of the peer's matching receive.
CallTag Communicator::pair_tag(DType dtype, std::size_t count, std::uint32_t& number) {
  return {.count = count,
          .number = number++,
          .step = step_,
          .collective = Collective::send,
          .dtype = dtype};
}

template <typename Body>
Status Communicator::run(Collective noted, const CallTag& tag, std::size_t bytes,
                         const Body& body) {
  if (closed_)
    return {ErrorCode::invalid_argument, "communicator '" + name() + "' has been closed"};
  if (posted_.has_value()) R2CCL_TRY(receive_posted());
  return channel_->call(noted, tag, bytes, body);
}

Status Communicator::all_reduce(const std::byte* in, std::byte* out, std::size_t count, DType dtype,
                                ReduceOp op, Algorithm algorithm) {
  if (op == ReduceOp::avg && dtype == DType::boolean)
    return {ErrorCode::invalid_argument, "op: avg is not defined for bool"};
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const std::size_t bytes = count * size_of(dtype);
  if (algorithm == Algorithm::automatic) algorithm = engine_->config().algorithm;
  const Reducer reducer{dtype, op, tree_, simd_};
  CallTag tag = flat_tag(Collective::all_reduce, dtype, op, count);
  tag.algorithm = algorithm;
  Status status = run(tag.collective, tag, bytes, [&] {
    return r2ccl::all_reduce(*channel_, in, out, count, reducer, choose(algorithm, bytes),
                             channel_->shares());
  });
  return compare_result(std::move(status), tag, out, bytes);
}

Status Communicator::all_gatherv(const std::byte* in, std::byte* out,
                                 std::span<const std::size_t> counts, DType dtype) {
  R2CCL_TRY(check_counts("sizes", counts));
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const CallTag tag = flat_tag(Collective::all_gather, dtype, ReduceOp::sum, total);
  channel_->works_on(in, out);
  channel_->set_rendezvous(is_device_memory(out));
  Status status = run(tag.collective, tag, total * size_of(dtype),
                      [&] { return r2ccl::all_gatherv(*channel_, in, out, counts, dtype); });
  return compare_result(std::move(status), tag, out, total * size_of(dtype));
}

Status Communicator::reduce_scatterv(const std::byte* in, std::byte* out,
                                     std::span<const std::size_t> counts, DType dtype,
                                     ReduceOp op) {
  R2CCL_TRY(check_counts("sizes", counts));
  if (op == ReduceOp::avg && dtype == DType::boolean)
    return {ErrorCode::invalid_argument, "op: avg is not defined for bool"};
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const Reducer reducer{dtype, op, tree_, simd_};
  const CallTag tag = flat_tag(Collective::reduce_scatter, dtype, op, total);
  return run(tag.collective, tag, total * size_of(dtype),
             [&] { return r2ccl::reduce_scatterv(*channel_, in, out, counts, reducer); });
}

Status Communicator::broadcast(std::byte* data, std::size_t count, DType dtype, int root) {
  R2CCL_TRY(check_rank("root", root));
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const CallTag tag = rooted_tag(Collective::broadcast, dtype, count, root);
  channel_->works_on(data, data);
  return run(tag.collective, tag, count * size_of(dtype),
             [&] { return r2ccl::broadcast(*channel_, data, count, dtype, root); });
}

Status Communicator::gather(const std::byte* in, std::byte* out,
                            std::span<const std::size_t> counts, DType dtype, int root) {
  R2CCL_TRY(check_rank("root", root));
  R2CCL_TRY(check_counts("sizes", counts));
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const CallTag tag = rooted_tag(Collective::gather, dtype, total, root);
  channel_->works_on(in, out);
  return run(tag.collective, tag, total * size_of(dtype),
             [&] { return r2ccl::gather(*channel_, in, out, counts, dtype, root); });
}

Status Communicator::all_to_allv(const std::byte* in, std::span<const std::size_t> in_counts,
                                 std::byte* out, std::span<const std::size_t> out_counts,
                                 DType dtype) {
  R2CCL_TRY(check_counts("in_sizes", in_counts));
  R2CCL_TRY(check_counts("out_sizes", out_counts));
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const std::size_t total =
      std::max(std::accumulate(in_counts.begin(), in_counts.end(), std::size_t{0}),
               std::accumulate(out_counts.begin(), out_counts.end(), std::size_t{0}));
  const CallTag tag = flat_tag(Collective::all_to_all, dtype, ReduceOp::sum, 0);
  channel_->works_on(in, out);
  channel_->set_rendezvous(is_device_memory(out));
  return run(tag.collective, tag, total * size_of(dtype),
             [&] { return r2ccl::all_to_allv(*channel_, in, in_counts, out, out_counts, dtype); });
}

Status Communicator::send_to(const std::byte* data, std::size_t count, DType dtype, int peer) {
  R2CCL_TRY(check_rank("dst", peer));
  if (peer == rank()) return {ErrorCode::invalid_argument, "dst: is this rank itself"};
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const CallTag tag = pair_tag(dtype, count, sends_[static_cast<std::size_t>(peer)]);
  channel_->works_on(data, data);
  return run(tag.collective, tag, count * size_of(dtype),
             [&] { return r2ccl::send(*channel_, data, count, dtype, peer); });
}

Status Communicator::receive_from(std::byte* data, std::size_t count, DType dtype, int peer) {
  R2CCL_TRY(check_rank("src", peer));
  if (peer == rank()) return {ErrorCode::invalid_argument, "src: is this rank itself"};
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const CallTag tag = pair_tag(dtype, count, receives_[static_cast<std::size_t>(peer)]);
  channel_->works_on(data, data);
  return run(Collective::recv, tag, count * size_of(dtype),
             [&] { return r2ccl::recv(*channel_, data, count, dtype, peer); });
}

Status Communicator::barrier() {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  const CallTag tag = flat_tag(Collective::barrier, DType::u8, ReduceOp::sum, 0);
  return run(tag.collective, tag, 0, [&] { return r2ccl::barrier(*channel_); });
}

// ---- the comparison of positions ----

Status Communicator::begin_step(std::uint32_t step, std::string about, bool compare) {
  if (step == 0) return {ErrorCode::invalid_argument, "step: is 0; must be from 1 to 4294967295"};
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  if (consensus() < Consensus::step) return {};
  if (compare) R2CCL_TRY(close_step());
  step_ = step;
  step_calls_ = 0;
  step_captures_ = 0;
  const Engine::Lock lock(*engine_);
  channel_->set_step(step, std::move(about));
  return {};
}

Status Communicator::end_step(bool compare) {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  if (compare) return close_step();
  step_ = 0;
  const Engine::Lock lock(*engine_);
  channel_->set_step(0, {});
  return {};
}

Status Communicator::post_position() {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  if (step_ == 0 || posted_.has_value()) return {};
  return post_tag(position());
}

CallTag Communicator::position() {
  return {.count = step_captures_,
          .number = calls_++,
          .step = step_,
          .call = step_calls_,
          .kind = TagKind::end_of_step};
}

Status Communicator::close_step() {
  if (step_ == 0) return {};
  if (!posted_.has_value()) R2CCL_TRY(post_tag(position()));
  step_ = 0;
  R2CCL_TRY(receive_posted());
  const Engine::Lock lock(*engine_);
  channel_->set_step(0, {});
  return {};
}

Status Communicator::post_tag(const CallTag& tag) {
  R2CCL_TRY(run(tag.collective, tag, 0, [&] { return post_tags(*channel_); }));
  posted_ = tag;
  return {};
}

// The messages of a posted position come before those of later calls.
Status Communicator::receive_posted() {
  const CallTag tag = *std::exchange(posted_, std::nullopt);
  return channel_->call(tag.collective, tag, 0, [&] { return receive_tags(*channel_); });
}

Status Communicator::compare_result(Status status, const CallTag& tag, const std::byte* result,
                                    std::size_t bytes) {
  const auto each = static_cast<std::uint32_t>(engine_->config().consensus_result);
  if (!status.ok() || each == 0 || is_device_memory(result) || ++results_ % each != 0)
    return status;
  const CallTag compared{.number = tag.number,
                         .step = tag.step,
                         .site = crc32c(result, bytes),
                         .kind = TagKind::result};
  R2CCL_TRY(post_tag(compared));
  return receive_posted();
}

// ---- arguments ----

Status Communicator::check_direct() const {
  if (tree_.node_sizes.size() != static_cast<std::size_t>(size()))
    return {ErrorCode::invalid_argument, "several ranks are on one node"};
  std::vector<std::uint32_t> processes;
  for (const Peer* peer : channel_->others()) processes.push_back(peer->process);
  return engine_->check_reach(processes);
}

std::vector<std::uint8_t> Communicator::lost_bandwidths() {
  const std::lock_guard guard(call_mutex_);
  const Engine::Lock lock(*engine_);
  return channel_->lost_bandwidths();
}

std::vector<Epoch> Communicator::rdma_epochs() const {
  const Engine::Lock lock(*engine_);
  std::vector<Epoch> epochs;
  for (const Peer* peer : channel_->others())
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
                                           " entries; needs one for each of " +
                                           std::to_string(size()) + " ranks"};
}

}  // namespace r2ccl
