#include "sim/node.hpp"

#include <algorithm>
#include <utility>

#include "sim/sim_channel.hpp"

namespace r2ccl::sim {
namespace {

using Bytes = std::vector<std::byte>;
using device::load_acquire;

using device::Rows;
using device::Sequence;

constexpr std::uint64_t rounded_up_to_128(std::uint64_t bytes) { return (bytes + 127) / 128 * 128; }

// Returns true if every byte equals the wanted byte or was never written.
bool is_part_of(const Bytes& target, const Bytes& wanted) {
  return std::ranges::equal(
      target, wanted, [](std::byte is, std::byte should) { return is == should || is == garbage; });
}

}  // namespace

Node::Node(World& world, const std::vector<InterNodeGroup>& groups,
           const std::vector<ExchangeCall>& calls, std::uint64_t seed, Observer observer)
    : world_(world),
      calls_(calls),
      observer_(std::move(observer)),
      number_(static_cast<std::uint32_t>(groups.front().channel.rank())),
      random_(seed) {
  for (const InterNodeGroup& group : groups) {
    gpus_.push_back(std::make_unique<Gpu>());
    gpus_.back()->local_rank = static_cast<std::uint32_t>(gpus_.size() - 1);
    open(*gpus_.back(), group);
  }
  connect();
}

void Node::open(Gpu& gpu, const InterNodeGroup& group) {
  gpu.channel = &group.channel;
  const auto blocks = static_cast<std::uint32_t>(1 + random_.below(3));
  gpu.grid = std::make_unique<Grid>(world_, group.channel.world_rank(), blocks, random_.next());
  std::uint64_t input_bytes = 0;
  std::uint64_t output_bytes = 0;
  for (std::size_t call = 0; call < calls_.size(); ++call) {
    gpu.rank_calls.push_back(
        std::make_unique<RankCall>(group.channel, group.calls[call], group.tree));
    input_bytes =
        std::max<std::uint64_t>(input_bytes, rounded_up_to_128(calls_[call].input_bytes()));
    output_bytes =
        std::max<std::uint64_t>(output_bytes, rounded_up_to_128(calls_[call].output_bytes()));
  }
  const std::uint64_t entry_bytes = input_bytes + output_bytes;
  gpu.staging.assign(device::ring * entry_bytes, garbage);
  gpu.memory.assign(device::ring * entry_bytes, garbage);
  gpu.exchange.mailbox = &gpu.mailbox;
  gpu.exchange.state = &gpu.state;
  gpu.exchange.staging = {gpu.staging.data(), entry_bytes, input_bytes};
  gpu.exchange.node.own = gpu.local_rank;
  gpu.exchange.node.entry_bytes = entry_bytes;
  gpu.exchange.node.result_offset = input_bytes;
  compile(gpu);
}

void Node::connect() {
  for (const auto& gpu : gpus_) {
    device::LocalPeers& node = gpu->exchange.node;
    node.ranks = static_cast<std::uint32_t>(gpus_.size());
    for (std::uint32_t local_rank = 0; local_rank < node.ranks; ++local_rank) {
      node.inboxes[local_rank] = &gpus_[local_rank]->inbox;
      node.memory[local_rank] = gpus_[local_rank]->memory.data();
    }
  }
}

// ---- the streams ----

// Builds the stream of a GPU.  Every GPU runs the kernels in the same order, because GPUs wait for
// each other.
void Node::compile(Gpu& gpu) {
  for (std::size_t call = 0; call < calls_.size(); ++call) {
    const bool ahead = calls_[call].ahead && call + 1 < calls_.size();
    add_posts(gpu, call);
    if (ahead) add_posts(gpu, call + 1);
    add_deliveries(gpu, call, ahead ? 1 : 0);
    if (ahead) add_deliveries(gpu, ++call, 0);
  }
  gpu.program.push_back({.body = Body::quiesce, .call = calls_.size() - 1});
}

void Node::add_posts(Gpu& gpu, std::size_t number) {
  const ExchangeCall& call = calls_[number];
  const std::uint64_t bytes = call.input_bytes();
  if (call.collective == Collective::all_gather) {
    gpu.program.push_back({.body = Body::stage_in_place, .call = number, .rows = {1, bytes}});
    return;
  }
  // Publishes the input with a single kernel or with two.
  const std::uint64_t first = random_.below(2) == 0 ? random_.below(bytes + 1) : 0;
  if (first > 0)
    gpu.program.push_back(
        {.body = Body::publish_input, .call = number, .rows = {1, first}, .last = false});
  gpu.program.push_back(
      {.body = Body::publish_input, .call = number, .rows = {1, bytes - first, 0, first, first}});
  const Rows rows = call.rows_of(gpu.local_rank);
  const std::uint64_t part =
      rows.count == 1 && random_.below(2) == 0
          ? random_.below(rows.bytes / size_of(call.dtype) + 1) * size_of(call.dtype)
          : 0;
  if (part > 0)
    gpu.program.push_back({.body = Body::local_reduce_scatter,
                           .call = number,
                           .rows = {1, part, 0, 0, rows.first},
                           .last = false});
  Rows rest = rows;
  if (part > 0) rest = {1, rows.bytes - part, 0, part, rows.first + part};
  gpu.program.push_back({.body = Body::local_reduce_scatter, .call = number, .rows = rest});
}

void Node::add_deliveries(Gpu& gpu, std::size_t number, std::uint32_t lag) {
  const ExchangeCall& call = calls_[number];
  if (call.collective == Collective::reduce_scatter) {
    gpu.program.push_back({.body = Body::deliver_shard, .call = number, .lag = lag});
    return;
  }
  gpu.program.push_back({.body = Body::publish_result, .call = number, .lag = lag});
  Kernel first{.body = Body::local_all_gather, .call = number, .last = false, .lag = lag};
  Kernel last{.body = Body::local_all_gather, .call = number, .lag = lag};
  const bool two = random_.below(2) == 0;
  for (std::uint32_t local_rank = 0; local_rank < call.local_ranks; ++local_rank)
    (two && local_rank == 0 ? first : last).outputs.of[local_rank] = call.rows_of(local_rank);
  if (two) gpu.program.push_back(first);
  gpu.program.push_back(last);
}

// ---- the blocks ----

void Node::run_block(std::uint32_t local_rank, std::uint32_t block) {
  Gpu& gpu = *gpus_[local_rank];
  for (const Kernel& kernel : gpu.program) {
    if (block == 0) before(gpu, kernel);
    if (!gpu.grid->meet([] {}) || !gpu.grid->pause()) return;
    run(gpu, kernel, {block, gpu.grid->blocks(), 0, 1});
    if (!gpu.grid->meet([&] { after(gpu, kernel); })) return;
  }
}

void Node::run(Gpu& gpu, const Kernel& kernel, const device::ThreadPosition& at) {
  const ExchangeCall& call = calls_[kernel.call];
  const device::Exchange& exchange = gpu.exchange;
  const auto plan = static_cast<std::uint32_t>(kernel.call);
  const Rows own = call.rows_of(gpu.local_rank);
  const Grid::Block block{*gpu.grid};
  device::Shared shared{};
  switch (kernel.body) {
    case Body::publish_input:
      return device::publish_input(at, block, shared, exchange, gpu.source.data(), kernel.rows,
                                   kernel.last);
    case Body::local_reduce_scatter:
      return device::local_reduce_scatter(at, block, shared, exchange, kernel.rows, call.dtype,
                                          call.op, plan, kernel.last);
    case Body::stage_in_place:
      return device::stage_in_place(at, block, shared, exchange, gpu.source.data(), call.bytes(),
                                    number_ * call.bytes(), plan);
    case Body::publish_result:
      return device::publish_result(at, block, shared, exchange, own.count * own.bytes,
                                    device::Reduction(), kernel.lag);
    case Body::local_all_gather:
      return device::local_all_gather(at, block, shared, exchange, kernel.outputs,
                                      gpu.target.data(), kernel.lag, kernel.last);
    case Body::deliver_shard:
      return device::deliver_shard(at, block, shared, exchange, gpu.target.data(),
                                   gpu.target.size(), device::Reduction(), kernel.lag);
    case Body::quiesce:
      if (at.block == 0) device::quiesce(block, exchange);
  }
}

void Node::before(Gpu& gpu, const Kernel& kernel) {
  const ExchangeCall& call = calls_[kernel.call];
  if (kernel.body == Body::stage_in_place ||
      (kernel.body == Body::publish_input && kernel.rows.offset == 0)) {
    observer_.think();
    gpu.source = call.input(number_, gpu.local_rank);
  } else if (kernel.body == Body::publish_result || kernel.body == Body::deliver_shard) {
    gpu.target.assign(call.output_bytes(), garbage);
  }
}

void Node::after(Gpu& gpu, const Kernel& kernel) {
  if (gpu.grid->stopped() || !kernel.last) return;
  check_step(gpu, kernel);
  // After these kernels the source belongs to the caller again; after quiesce, all memory does.
  if (kernel.body == Body::publish_input || kernel.body == Body::stage_in_place)
    std::ranges::fill(gpu.source, garbage);
  if (kernel.body == Body::quiesce) std::ranges::fill(gpu.memory, garbage);
}

void Node::check_step(Gpu& gpu, const Kernel& kernel) {
  const ExchangeCall& call = calls_[kernel.call];
  const device::Exchange& exchange = gpu.exchange;
  const auto number = static_cast<Sequence>(kernel.call + 1);
  const Rows own = call.rows_of(gpu.local_rank);
  const auto judge = [&](const device::Word& word, const std::byte* is, const Bytes& should,
                         const char* what) {
    if (load_acquire(word) != number) return;
    if (!std::equal(should.begin(), should.end(), is))
      observer_.wrong(gpu.local_rank, describe(call) + " " + what + " wrong bytes");
  };
  switch (kernel.body) {
    case Body::publish_input:
      return judge(gpu.inbox.input_ready[gpu.local_rank],
                   exchange.node.input(gpu.local_rank, number), gpu.source,
                   "published an input with");
    case Body::local_reduce_scatter:
      return judge(gpu.mailbox.posted, exchange.staging.input(number),
                   call.posted(number_, gpu.local_rank), "posted");
    case Body::stage_in_place:
      return judge(gpu.mailbox.posted, exchange.staging.result(number) + number_ * call.bytes(),
                   call.posted(number_, gpu.local_rank), "posted");
    case Body::publish_result:
      return judge(gpu.inbox.result_ready[gpu.local_rank],
                   exchange.node.result(gpu.local_rank, number),
                   rows_in(call.output(number_, gpu.local_rank), own), "published a result with");
    case Body::local_all_gather:
    case Body::deliver_shard: return check_target(gpu, kernel);
    case Body::quiesce: break;
  }
}

void Node::check_target(Gpu& gpu, const Kernel& kernel) {
  const ExchangeCall& call = calls_[kernel.call];
  const Bytes wanted = call.output(number_, gpu.local_rank);
  if (gpu.target == wanted || (is_over(gpu) && is_part_of(gpu.target, wanted))) return;
  observer_.wrong(gpu.local_rank, describe(call) + " delivered wrong bytes to its GPU");
}

bool Node::is_over(const Gpu& gpu) const {
  return load_acquire(gpu.mailbox.abort) != 0 || load_acquire(gpu.mailbox.lost) != 0;
}

// ---- the host ----

void Node::serve(std::uint32_t local_rank) {
  Gpu& gpu = *gpus_[local_rank];
  device::Server server(gpu.mailbox,
                        [this, &gpu](std::uint32_t plan, Sequence sequence) {
                          observer_.entered(gpu.local_rank);
                          return carry(gpu, plan, sequence);
                        },
                        {});
  for (std::size_t call = 0; call < calls_.size(); ++call) {
    Status status = await_call(gpu, server);
    if (gpu.grid->stopped()) return;
    if (status.ok()) status = server.serve();
    if (gpu.grid->stopped()) return;
    observer_.returned(local_rank, call, status);
    // The proxy is a thread and may run late.
    if (!status.ok() && !gpu.grid->pause()) return;
    if (!status.ok()) server.give_up(status.code());
    world_.touched(gpu.channel->world_rank());
    if (!status.ok()) return;
  }
}

// Waits for the next call.  Returns an error once a local peer is lost or the engine has ended.  A
// call already posted is carried out first, because the host polls for the loss only at intervals.
Status Node::await_call(Gpu& gpu, const device::Server& server) {
  const auto lost = [&] { return gpu.quits || load_acquire(gpu.mailbox.lost) != 0; };
  if (!gpu.grid->wait([&] { return server.due() || lost(); }) || !gpu.grid->pause()) return {};
  if (server.due()) return {};
  Status status(ErrorCode::aborted, "a GPU of this node gets no further results");
  gpu.channel->fail(status.code(), status.message());
  return status;
}

Status Node::carry(Gpu& gpu, std::size_t call, Sequence sequence) {
  const device::Staging& staging = gpu.exchange.staging;
  RankCall& rank_call = *gpu.rank_calls[call];
  std::byte* const result = staging.result(sequence);
  if (calls_[call].collective == Collective::all_gather) {
    const std::byte* const contributed = result + number_ * calls_[call].bytes();
    const Bytes own(contributed, contributed + calls_[call].bytes());
    return rank_call.carry(own.data(), result);
  }
  std::byte* const input = staging.input(sequence);
  Status status = rank_call.carry(input, result);
  // Any later read of the entry's input sees garbage.
  std::fill_n(input, rank_call.input().size(), garbage);
  return status;
}

void Node::quit(std::uint32_t local_rank) {
  Gpu& gpu = *gpus_[local_rank];
  gpu.quits = true;
  gpu.channel->fail(ErrorCode::aborted, "the engine of a GPU has ended");
  world_.touched(gpu.channel->world_rank());
}

}  // namespace r2ccl::sim
