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

// Each byte is as wanted or was never written.
bool is_part_of(const Bytes& target, const Bytes& wanted) {
  return std::ranges::equal(
      target, wanted, [](std::byte is, std::byte should) { return is == should || is == garbage; });
}

}  // namespace

Node::Node(World& world, const std::vector<Column>& columns, const std::vector<ExchangeCall>& calls,
           std::uint64_t seed, Observer observer)
    : world_(world),
      calls_(calls),
      observer_(std::move(observer)),
      number_(static_cast<std::uint32_t>(columns.front().channel.rank())),
      random_(seed) {
  for (const Column& column : columns) {
    gpus_.push_back(std::make_unique<Gpu>());
    gpus_.back()->place = static_cast<std::uint32_t>(gpus_.size() - 1);
    open(*gpus_.back(), column);
  }
  connect();
}

void Node::open(Gpu& gpu, const Column& column) {
  gpu.channel = &column.channel;
  const auto blocks = static_cast<std::uint32_t>(1 + random_.below(3));
  gpu.grid = std::make_unique<Grid>(world_, column.channel.world_rank(), blocks, random_.next());
  std::uint64_t input_bytes = 0;
  std::uint64_t output_bytes = 0;
  for (std::size_t call = 0; call < calls_.size(); ++call) {
    gpu.parts.push_back(std::make_unique<Part>(column.channel, column.calls[call], column.tree));
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
  gpu.exchange.node.own = gpu.place;
  gpu.exchange.node.entry_bytes = entry_bytes;
  gpu.exchange.node.result_offset = input_bytes;
  compile(gpu);
}

void Node::connect() {
  for (const auto& gpu : gpus_) {
    device::LocalPeers& node = gpu->exchange.node;
    node.ranks = static_cast<std::uint32_t>(gpus_.size());
    for (std::uint32_t place = 0; place < node.ranks; ++place) {
      node.inboxes[place] = &gpus_[place]->inbox;
      node.memory[place] = gpus_[place]->memory.data();
    }
  }
}

// ---- the streams ----

// The same order on every GPU, since each waits for the others.
void Node::compile(Gpu& gpu) {
  for (std::size_t call = 0; call < calls_.size(); ++call) {
    const bool ahead = calls_[call].ahead && call + 1 < calls_.size();
    add_posts(gpu, call);
    if (ahead) add_posts(gpu, call + 1);
    add_deliveries(gpu, call, ahead ? 1 : 0);
    if (ahead) add_deliveries(gpu, ++call, 0);
  }
  gpu.program.push_back({.body = Body::depart, .call = calls_.size() - 1});
}

void Node::add_posts(Gpu& gpu, std::size_t number) {
  const ExchangeCall& call = calls_[number];
  const std::uint64_t bytes = call.input_bytes();
  if (call.collective == Collective::all_gather) {
    gpu.program.push_back({.body = Body::bring, .call = number, .rows = {1, bytes}});
    return;
  }
  // In one kernel, or in two.
  const std::uint64_t first = random_.below(2) == 0 ? random_.below(bytes + 1) : 0;
  if (first > 0)
    gpu.program.push_back({.body = Body::share, .call = number, .rows = {1, first}, .last = false});
  gpu.program.push_back(
      {.body = Body::share, .call = number, .rows = {1, bytes - first, 0, first, first}});
  const Rows rows = call.rows_of(gpu.place);
  const std::uint64_t part =
      rows.count == 1 && random_.below(2) == 0
          ? random_.below(rows.bytes / size_of(call.dtype) + 1) * size_of(call.dtype)
          : 0;
  if (part > 0)
    gpu.program.push_back(
        {.body = Body::sum_up, .call = number, .rows = {1, part, 0, 0, rows.first}, .last = false});
  Rows rest = rows;
  if (part > 0) rest = {1, rows.bytes - part, 0, part, rows.first + part};
  gpu.program.push_back({.body = Body::sum_up, .call = number, .rows = rest});
}

void Node::add_deliveries(Gpu& gpu, std::size_t number, std::uint32_t lag) {
  const ExchangeCall& call = calls_[number];
  if (call.collective == Collective::reduce_scatter) {
    gpu.program.push_back({.body = Body::take, .call = number, .lag = lag});
    return;
  }
  gpu.program.push_back({.body = Body::spread, .call = number, .lag = lag});
  Kernel first{.body = Body::collect, .call = number, .last = false, .lag = lag};
  Kernel last{.body = Body::collect, .call = number, .lag = lag};
  const bool two = random_.below(2) == 0;
  for (std::uint32_t place = 0; place < call.places; ++place)
    (two && place == 0 ? first : last).results.of[place] = call.rows_of(place);
  if (two) gpu.program.push_back(first);
  gpu.program.push_back(last);
}

// ---- the blocks ----

void Node::run_block(std::uint32_t place, std::uint32_t block) {
  Gpu& gpu = *gpus_[place];
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
  const Rows own = call.rows_of(gpu.place);
  const Grid::Block block{*gpu.grid};
  device::Shared shared{};
  switch (kernel.body) {
    case Body::share:
      return device::share(at, block, shared, exchange, gpu.source.data(), kernel.rows,
                           kernel.last);
    case Body::sum_up:
      return device::sum_up(at, block, shared, exchange, kernel.rows, call.dtype, call.op, plan,
                            kernel.last);
    case Body::bring:
      return device::bring(at, block, shared, exchange, gpu.source.data(), call.bytes(),
                           number_ * call.bytes(), plan);
    case Body::spread:
      return device::spread(at, block, shared, exchange, own.count * own.bytes, device::Sum(),
                            kernel.lag);
    case Body::collect:
      return device::collect(at, block, shared, exchange, kernel.results, gpu.target.data(),
                             kernel.lag, kernel.last);
    case Body::take:
      return device::take(at, block, shared, exchange, gpu.target.data(), gpu.target.size(),
                          device::Sum(), kernel.lag);
    case Body::depart:
      if (at.block == 0) device::depart(block, exchange);
  }
}

void Node::before(Gpu& gpu, const Kernel& kernel) {
  const ExchangeCall& call = calls_[kernel.call];
  if (kernel.body == Body::bring || (kernel.body == Body::share && kernel.rows.offset == 0)) {
    observer_.think();
    gpu.source = call.input(number_, gpu.place);
  } else if (kernel.body == Body::spread || kernel.body == Body::take) {
    gpu.target.assign(call.output_bytes(), garbage);
  }
}

void Node::after(Gpu& gpu, const Kernel& kernel) {
  if (gpu.grid->stopped() || !kernel.last) return;
  check_step(gpu, kernel);
  // The source is the caller's again, and in the end all memory is.
  if (kernel.body == Body::share || kernel.body == Body::bring)
    std::ranges::fill(gpu.source, garbage);
  if (kernel.body == Body::depart) std::ranges::fill(gpu.memory, garbage);
}

void Node::check_step(Gpu& gpu, const Kernel& kernel) {
  const ExchangeCall& call = calls_[kernel.call];
  const device::Exchange& exchange = gpu.exchange;
  const auto number = static_cast<Sequence>(kernel.call + 1);
  const Rows own = call.rows_of(gpu.place);
  const auto judge = [&](const device::Word& word, const std::byte* is, const Bytes& should,
                         const char* what) {
    if (load_acquire(word) != number) return;
    if (!std::equal(should.begin(), should.end(), is))
      observer_.wrong(gpu.place, describe(call) + " " + what + " wrong bytes");
  };
  switch (kernel.body) {
    case Body::share:
      return judge(gpu.inbox.shared[gpu.place], exchange.node.input(gpu.place, number), gpu.source,
                   "shared");
    case Body::sum_up:
      return judge(gpu.mailbox.posted, exchange.staging.input(number),
                   call.posted(number_, gpu.place), "posted");
    case Body::bring:
      return judge(gpu.mailbox.posted, exchange.staging.result(number) + number_ * call.bytes(),
                   call.posted(number_, gpu.place), "posted");
    case Body::spread:
      return judge(gpu.inbox.spread[gpu.place], exchange.node.result(gpu.place, number),
                   rows_in(call.output(number_, gpu.place), own), "spread");
    case Body::collect:
    case Body::take: return check_target(gpu, kernel);
    case Body::depart: break;
  }
}

void Node::check_target(Gpu& gpu, const Kernel& kernel) {
  const ExchangeCall& call = calls_[kernel.call];
  const Bytes wanted = call.output(number_, gpu.place);
  if (gpu.target == wanted || (is_over(gpu) && is_part_of(gpu.target, wanted))) return;
  observer_.wrong(gpu.place, describe(call) + " delivered wrong bytes to its GPU");
}

bool Node::is_over(const Gpu& gpu) const {
  return load_acquire(gpu.mailbox.abort) != 0 || load_acquire(gpu.mailbox.lost) != 0;
}

// ---- the host ----

void Node::serve(std::uint32_t place) {
  Gpu& gpu = *gpus_[place];
  device::Server server(gpu.mailbox,
                        [this, &gpu](std::uint32_t plan, Sequence sequence) {
                          observer_.entered(gpu.place);
                          return carry(gpu, plan, sequence);
                        },
                        {});
  for (std::size_t call = 0; call < calls_.size(); ++call) {
    Status status = await_call(gpu, server);
    if (gpu.grid->stopped()) return;
    if (status.ok()) status = server.serve();
    if (gpu.grid->stopped()) return;
    observer_.returned(place, call, status);
    // The proxy is a thread, which may be late.
    if (!status.ok() && !gpu.grid->pause()) return;
    if (!status.ok()) server.give_up(status.code());
    world_.touched(gpu.channel->world_rank());
    if (!status.ok()) return;
  }
}

// What is posted is carried out though a neighbour is lost: the host learns of that from its user,
// who asks now and then.
Status Node::await_call(Gpu& gpu, const device::Server& server) {
  const auto lost = [&] { return gpu.quits || load_acquire(gpu.mailbox.lost) != 0; };
  if (!gpu.grid->wait([&] { return server.due() || lost(); }) || !gpu.grid->pause()) return {};
  if (server.due()) return {};
  Status status(ErrorCode::aborted, "a GPU of this node gets no more results");
  gpu.channel->fail(status.code(), status.message());
  return status;
}

Status Node::carry(Gpu& gpu, std::size_t call, Sequence sequence) {
  const device::Staging& staging = gpu.exchange.staging;
  Part& part = *gpu.parts[call];
  std::byte* const result = staging.result(sequence);
  if (calls_[call].collective == Collective::all_gather) {
    const std::byte* const brought = result + number_ * calls_[call].bytes();
    const Bytes own(brought, brought + calls_[call].bytes());
    return part.carry(own.data(), result);
  }
  std::byte* const input = staging.input(sequence);
  Status status = part.carry(input, result);
  // A later read of the entry's input reads garbage.
  std::fill_n(input, part.input().size(), garbage);
  return status;
}

void Node::quit(std::uint32_t place) {
  Gpu& gpu = *gpus_[place];
  gpu.quits = true;
  gpu.channel->fail(ErrorCode::aborted, "the engine of a GPU has ended");
  world_.touched(gpu.channel->world_rank());
}

}  // namespace r2ccl::sim
