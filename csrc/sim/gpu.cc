#include "sim/gpu.hpp"

#include <algorithm>
#include <utility>

#include "sim/sim_channel.hpp"

namespace r2ccl::sim {
namespace {

constexpr std::uint64_t rounded_up(std::uint64_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

Gpu::Gpu(World& world, SimChannel& channel, const std::vector<Call>& calls,
         const ReductionTree& tree, std::uint64_t seed, Observer observer)
    : world_(world),
      rank_(channel.world_rank()),
      calls_(calls),
      observer_(std::move(observer)),
      random_(seed),
      grid_(world, rank_, static_cast<std::uint32_t>(1 + random_.below(3)), random_.next()) {
  compile(calls, tree, channel);
}

// ---- the stream ----

void Gpu::compile(const std::vector<Call>& calls, const ReductionTree& tree, SimChannel& channel) {
  std::uint64_t input_bytes = 0;
  std::uint64_t result_bytes = 0;
  for (const Call& call : calls) {
    rank_calls_.push_back(std::make_unique<RankCall>(channel, call, tree));
    input_bytes = std::max<std::uint64_t>(input_bytes, rank_calls_.back()->input().size());
    result_bytes = std::max<std::uint64_t>(result_bytes, rank_calls_.back()->expected().size());
  }
  input_bytes = rounded_up(input_bytes);
  const std::uint64_t entry_bytes = input_bytes + rounded_up(result_bytes);
  memory_.assign(device::ring * entry_bytes, garbage);
  staging_ = {memory_.data(), entry_bytes, input_bytes};
  // Like the slices of a large collective, a call may be staged while the previous call is carried
  // out.  Some results are not delivered, which lets the device run ahead as far as allowed.
  for (std::size_t call = 0; call < calls.size(); ++call) {
    const bool ahead = call + 1 < calls.size() && random_.below(3) == 0;
    const bool wanted = random_.below(3) != 0;
    add_stages(call);
    if (ahead) add_stages(call + 1);
    if (wanted) add_delivery(call, ahead ? 1 : 0);
    if (ahead) add_delivery(++call, 0);
  }
}

void Gpu::add_stages(std::size_t call) {
  const std::uint64_t bytes = rank_calls_[call]->input().size();
  const std::uint64_t first = random_.below(3) == 0 ? random_.below(bytes + 1) : 0;
  if (first > 0) program_.push_back({call, true, rows_of(first, 0), false, 0});
  program_.push_back({call, true, rows_of(bytes - first, first), true, 0});
}

void Gpu::add_delivery(std::size_t call, std::uint32_t lag) {
  const std::uint64_t bytes = rank_calls_[call]->expected().size();
  if (bytes > 0) program_.push_back({call, false, rows_of(bytes, 0), true, lag});
}

device::Rows Gpu::rows_of(std::uint64_t bytes, std::uint64_t offset) {
  const std::uint64_t rows = bytes % 4 == 0 && random_.below(2) == 0 ? 4 : 1;
  return {rows, bytes / rows, bytes / rows, offset};
}

// ---- the blocks ----

void Gpu::run_block(std::uint32_t block) {
  const device::ThreadPosition at{block, grid_.blocks(), 0, 1};
  for (const Kernel& kernel : program_) {
    if (block == 0) before(kernel);
    if (!grid_.meet([] {}) || !grid_.pause()) return;
    device::Shared shared{};
    if (kernel.stages) {
      device::stage(at, Grid::Block{grid_}, shared, mailbox_, state_, staging_,
                    source_.data() + kernel.rows.offset, kernel.rows,
                    static_cast<std::uint32_t>(kernel.call), kernel.last);
    } else {
      device::deliver(at, Grid::Block{grid_}, shared, mailbox_, state_, staging_, target_.data(),
                      kernel.rows, kernel.lag);
    }
    if (!grid_.meet([&] { after(kernel); })) return;
  }
}

void Gpu::before(const Kernel& kernel) {
  const RankCall& rank_call = *rank_calls_[kernel.call];
  if (!kernel.stages) {
    target_.assign(rank_call.expected().size(), garbage);
  } else if (kernel.rows.offset == 0) {
    observer_.think();
    source_ = rank_call.input();
  }
}

void Gpu::after(const Kernel& kernel) {
  if (grid_.stopped()) return;
  if (kernel.stages) {
    // Staging is complete: the source belongs to the caller again.
    if (kernel.last) std::fill(source_.begin(), source_.end(), garbage);
    return;
  }
  const auto untouched = [](std::byte byte) { return byte == garbage; };
  if (target_ == rank_calls_[kernel.call]->expected()) return;
  if (failed_ && std::ranges::all_of(target_, untouched)) return;
  observer_.wrong(describe(calls_[kernel.call]) + " delivered wrong bytes to its GPU");
}

// ---- the host ----

void Gpu::serve() {
  device::Server server(mailbox_,
                        [this](std::uint32_t plan, device::Sequence sequence) {
                          const Call& call = calls_[plan];
                          observer_.entered();
                          std::byte* const in = staging_.input(sequence);
                          Status status = rank_calls_[plan]->carry(in, staging_.result(sequence));
                          // Any later read of the entry's input sees garbage.
                          std::fill_n(in, rank_calls_[plan]->input().size(), garbage);
                          observer_.returned(call, status);
                          return status;
                        },
                        {});
  for (std::size_t served = 0; served < calls_.size(); ++served) {
    if (!grid_.wait([&] { return server.due(); }) || !grid_.pause()) return;
    const Status status = server.serve();
    failed_ = !status.ok();
    if (failed_) server.give_up(status.code());
    world_.touched(rank_);
    if (failed_) return;
  }
}

}  // namespace r2ccl::sim
