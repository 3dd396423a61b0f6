#include "sim/job.hpp"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

namespace r2ccl::sim {
namespace {

// Adds an exchange at random.  A separate random generator keeps the rest of the job the same with
// and without the exchange.
void add_exchange(Job& job, std::uint64_t seed, const FaultOptions& options) {
  Random random(~seed ^ 0x0DE5);
  if (job.world.ranks > 4 || !random.chance(options.exchanges)) return;
  const auto nodes = static_cast<std::uint32_t>(job.world.ranks);
  Job::Exchange made;
  made.first_inter_node = job.communicators.size();
  made.local_ranks = static_cast<std::uint32_t>(2 + random.below(2));
  const std::uint64_t calls = 3 + random.below(8);
  for (std::uint64_t call = 0; call < calls; ++call)
    made.calls.push_back(random_exchange(random, nodes, made.local_ranks));
  if (random.chance(options.engine_ends))
    made.quit = {static_cast<int>(random.below(nodes)),
                 static_cast<std::uint32_t>(random.below(made.local_ranks)),
                 static_cast<TimeNs>(random.below(8 * ns_per_ms))};
  for (std::uint32_t local_rank = 0; local_rank < made.local_ranks; ++local_rank) {
    Job::Communicator group;
    group.id = 10 + local_rank;  // differs from all other ids
    group.inter_node = true;
    for (std::uint32_t node = 0; node < nodes; ++node)
      group.members.push_back(static_cast<int>(node));
    group.tree = ReductionTree::from_nodes(group.members);
    for (std::uint32_t call = 0; call < calls; ++call)
      group.calls.push_back(made.calls[call].inter_node_call(call, local_rank));
    job.communicators.push_back(std::move(group));
  }
  job.exchange = std::move(made);
}

// Makes some rails reserves or rails of a shared unit, at random.  A separate random generator
// keeps the rest of the job the same with and without them.
void add_order(Job& job, std::uint64_t seed, const FaultOptions& options) {
  Random random(seed ^ 0x0D3A);
  LinkOptions& link = job.world.link;
  const auto data = static_cast<std::uint64_t>(std::ranges::count_if(
      job.world.rails, [](RailKind kind) { return kind != RailKind::control; }));
  // Rail 0 stays a rail of the first choice.
  if (data > 1 && random.chance(options.reserves))
    for (std::uint64_t rail = 1; rail < data; ++rail)
      if (random.below(2) == 0) link.reserves |= std::uint64_t{1} << rail;
  if (data > 1 && random.chance(options.units))
    for (std::uint64_t rail = 0; rail < data; ++rail)
      link.units[rail] = static_cast<std::uint8_t>(random.below(3));
  link.shared_fate_ns = random.between(5 * ns_per_ms, 40 * ns_per_ms);
}

// Adds byte streams at random, with a separate random generator as above.
void add_streams(Job& job, std::uint64_t seed, const FaultOptions& options) {
  Random random(~seed ^ 0x57EA);
  if (job.world.ranks > 4 || !random.chance(options.streams)) return;
  StreamsShape& shape = job.world.link.streams;
  shape.slot_bytes =
      std::min(job.world.link.shape.slot_bytes, random.one_of(std::array{64U, 256U}));
  shape.slots = random.one_of(std::array<std::uint16_t, 3>{2, 4, 8});
  shape.spare_slots = static_cast<std::uint16_t>(random.below(9));
  shape.ack_later_bytes = 64;
  Job::Streams made;
  made.mux.window = random.one_of(std::array{100U, 400U, 1500U});
  made.mux.queue_bytes = random.one_of(std::array{60U, 500U});
  made.mux.bulk_bytes = random.one_of(std::array{1U, 300U});
  made.mux.copied_bytes = random.one_of(std::array{24U, 64U, 256U});
  made.ports = static_cast<std::uint16_t>(1 + random.below(6));
  made.connections = static_cast<std::uint32_t>(1 + random.below(3));
  made.most_bytes = random.one_of(std::array{200U, 1000U, 4000U});
  made.seed = random.next();
  job.streams = made;
}

// Adds posted messages at random, with a separate random generator as above.
void add_posted(Job& job, std::uint64_t seed, const FaultOptions& options) {
  Random random(~seed ^ 0x2959);
  if (job.world.ranks > 4 || !random.chance(options.posted)) return;
  job.world.link.posted = true;
  job.world.link.put_bytes = random.one_of(std::array{64U, 300U, 4096U});
  Job::PostedMessages made;
  made.connections = static_cast<std::uint32_t>(1 + random.below(3));
  made.buffers = random.one_of(std::array{1U, 2U, 4U});
  made.most_bytes = random.one_of(std::array{40U, 400U, 2000U});
  made.messages = 2 + random.below(30);
  made.seed = random.next();
  job.posted = made;
}

// Returns the calls in steps of the given lengths, each with its end, as a rank makes them that
// leaves out call `skipped`.  Calls beyond the last step are outside of steps.
std::vector<Call> in_steps(const std::vector<Call>& calls, const std::vector<std::size_t>& lengths,
                           std::size_t skipped) {
  std::vector<Call> program;
  std::uint32_t number = calls.front().number;
  std::uint32_t step = 0;
  std::size_t index = 0;
  const auto add = [&](Call call) {
    call.number = number++;
    program.push_back(std::move(call));
  };
  for (const std::size_t length : lengths) {
    Call end;
    end.step = ++step;
    end.kind = TagKind::end_of_step;
    end.counts.assign(calls.front().counts.size(), 0);
    for (const std::size_t next = index + length; index < next; ++index) {
      if (index == skipped) continue;
      Call call = calls[index];
      call.step = step;
      // Calls between two ranks have no number within the step.
      if (call.collective != Collective::send) call.call = end.call++;
      add(std::move(call));
    }
    add(std::move(end));
  }
  for (; index < calls.size(); ++index) add(calls[index]);
  return program;
}

// Gives some communicators steps at random, and lets a rank of some leave out a call.  A separate
// random generator as above.
void add_steps(Job& job, std::uint64_t seed, const FaultOptions& options) {
  Random random(~seed ^ 0x57E9);
  for (Job::Communicator& communicator : job.communicators) {
    if (communicator.on_gpu || communicator.inter_node || !random.chance(options.compared))
      continue;
    const std::vector<Call> calls = std::exchange(communicator.calls, {});
    const std::size_t count = calls.size() - 2;  // without the two barriers
    std::vector<std::size_t> lengths;
    for (std::size_t left = count; left > 0; left -= lengths.back())
      lengths.push_back(std::min<std::size_t>(left, 1 + random.below(4)));
    communicator.calls = in_steps(calls, lengths, calls.size());
    communicator.compared = true;
    const bool parts = random.chance(options.parted);
    const std::size_t skipped = random.below(count);
    // The number of calls between two ranks is not compared.
    if (!parts || calls[skipped].collective == Collective::send) continue;
    Job::Communicator::Parting parting;
    parting.own = random.below(communicator.members.size());
    parting.calls = in_steps(calls, lengths, skipped);
    for (std::size_t end = 0; end <= skipped; ++parting.step) end += lengths[parting.step];
    communicator.parting = std::move(parting);
  }
}

}  // namespace

Job make_job(std::uint64_t seed, const FaultOptions& options) {
  Random random(seed);
  Random gpus(~seed);  // separate: the rest of the job is the same with and without GPUs
  Job job;
  World::Options& world = job.world;
  world.seed = random.next();
  const std::uint64_t size = random.below(100);
  world.ranks = static_cast<int>(size < 50   ? 2
                                 : size < 72 ? 3
                                 : size < 86 ? 4
                                 : size < 98 ? 5 + random.below(4)
                                             : 9 + random.below(8));
  const std::uint64_t most_rails = world.ranks > 8 ? 3 : 8;
  const std::size_t rails = random.below(5) == 0
                                ? 1 + random.below(most_rails)
                                : 1 + random.below(std::min<std::uint64_t>(3, most_rails));
  world.rails.clear();
  for (std::size_t rail = 0; rail < rails; ++rail)
    world.rails.push_back(random.below(2) == 0 ? RailKind::tcp : RailKind::verbs);
  if (random.below(3) == 0) world.rails.push_back(RailKind::control);

  for (std::size_t kind = 0; kind < fault_kinds; ++kind)
    if (random.chance(options.of(static_cast<FaultKind>(kind))))
      job.enabled.push_back(static_cast<FaultKind>(kind));
  // In every second run of `fault_kinds` seeds, each seed begins with another kind.  A campaign
  // therefore covers every kind.
  if (seed / fault_kinds % 2 == 1) {
    const auto due = static_cast<FaultKind>(seed % fault_kinds);
    std::erase(job.enabled, due);
    job.enabled.insert(job.enabled.begin(), due);
    job.due = due;
  }
  job.fault_count = job.enabled.empty() ? 0 : 1 + random.below(12);
  job.fault_span = random.between(2 * ns_per_ms, 60 * ns_per_ms);

  LinkOptions& link = world.link;
  link.shape.chunk_bytes = random.one_of(std::array{64U, 128U, 256U});
  link.shape.slot_bytes = link.shape.chunk_bytes * static_cast<std::uint32_t>(1 + random.below(4));
  link.shape.staging_bytes = random.one_of(std::array{0U, 0U, 128U, 512U, 4096U});
  link.shape.slots = random.one_of(std::array<std::uint16_t, 3>{2, 4, 8});
  link.shape.spare_slots = static_cast<std::uint16_t>(random.below(5));
  link.shape.checksum =
      std::find(job.enabled.begin(), job.enabled.end(), FaultKind::corrupt) != job.enabled.end() ||
      random.below(4) == 0;
  // In every fourth seed, numbers pass the end of 31 or 32 bits.  Epochs never wrap: a rail would
  // have to reconnect for years.
  constexpr std::array<std::uint64_t, 2> ends{std::uint64_t{1} << 31, std::uint64_t{1} << 32};
  const bool passes = seed % 4 == 3;
  const std::uint64_t first = passes ? ends[seed / 4 % 2] - 4 : 0;
  link.shape.first_number = first;
  link.first_epoch = static_cast<Epoch>(passes && first == ends[1] - 4 ? first - 100'000 : first);
  link.small_message_bytes = link.shape.chunk_bytes;
  link.fallback = random.below(3) != 0;
  link.ack_deadline_floor_ns = 2 * ns_per_ms;
  link.dead_deadline_ns = 10 * ns_per_ms;
  link.probe_interval_ns = 20 * ns_per_ms;
  link.probation_timeout_ns = 20 * ns_per_ms;
  link.rejoin_backoff_min_ns = 1 * ns_per_ms;
  link.rejoin_backoff_max_ns = 8 * ns_per_ms;
  link.flap_half_life_s = 0.01;
  world.handshake_timeout_ns = 20 * ns_per_ms;
  world.link_timeout_ns = 1500 * ns_per_ms;
  if (std::find(job.enabled.begin(), job.enabled.end(), FaultKind::late_completions) !=
      job.enabled.end())
    world.delays.poll_ns = random.between(10'000, ns_per_ms);

  const std::size_t communicators = world.ranks > 8 ? 1 : 1 + random.below(3);
  for (std::size_t index = 0; index < communicators; ++index) {
    Job::Communicator added;
    added.id = index + 1;
    added.on_gpu = gpus.chance(options.on_gpu);
    for (int rank = 0; rank < world.ranks; ++rank)
      if (index == 0 || world.ranks == 2 || random.below(3) != 0) added.members.push_back(rank);
    if (added.members.size() < 2) continue;
    std::vector<int> nodes;
    for (std::size_t i = 0; i < added.members.size(); ++i)
      nodes.push_back(static_cast<int>(random.below(added.members.size())));
    added.tree = ReductionTree::from_nodes(nodes);
    const std::size_t calls = (world.ranks > 8 ? 2 : 3) + random.below(world.ranks > 4 ? 4 : 10);
    for (std::size_t call = 0; call < calls; ++call) {
      const std::size_t bytes = random.below(2) == 0 ? 4096 : 300;
      added.calls.push_back(random_call(random, static_cast<std::uint32_t>(first + call),
                                        static_cast<int>(added.members.size()), bytes));
    }
    // Two barriers end the calls: the failure of a rank becomes known to all ranks in the next
    // call.
    for (int last = 0; last < 2; ++last) {
      Call barrier;
      barrier.number = static_cast<std::uint32_t>(first + added.calls.size());
      barrier.counts.assign(added.members.size(), 0);
      added.calls.push_back(barrier);
    }
    job.communicators.push_back(std::move(added));
  }
  add_exchange(job, seed, options);
  add_order(job, seed, options);
  add_streams(job, seed, options);
  add_posted(job, seed, options);
  add_steps(job, seed, options);
  return job;
}

std::string describe(const Job& job) {
  std::ostringstream text;
  text << job.world.ranks << " ranks, rails";
  for (std::size_t rail = 0; rail < job.world.rails.size(); ++rail) {
    text << ' ' << name_of(job.world.rails[rail]);
    if ((job.world.link.reserves >> rail & 1) != 0) text << " (reserve)";
    if (job.world.link.units[rail] != 0) text << " (unit " << +job.world.link.units[rail] << ')';
  }
  text << ", " << job.communicators.size() << " communicators ("
       << std::ranges::count_if(job.communicators, &Job::Communicator::on_gpu) << " on GPUs, "
       << (job.exchange ? job.exchange->local_ranks : 0) << " inter-node groups, "
       << std::ranges::count_if(job.communicators, &Job::Communicator::compared) << " compared, "
       << std::ranges::count_if(job.communicators,
                                [](const auto& each) { return each.parting.has_value(); })
       << " parted), " << (job.streams ? job.streams->ports * job.streams->connections : 0U)
       << " streams each way, " << (job.posted ? job.posted->connections : 0U)
       << " posted connections each way, slots " << job.world.link.shape.slots << '+'
       << job.world.link.shape.spare_slots << " of " << job.world.link.shape.slot_bytes
       << " bytes, faults";
  for (const FaultKind kind : job.enabled) text << ' ' << name_of(kind);
  return text.str();
}

}  // namespace r2ccl::sim
