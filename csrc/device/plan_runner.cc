#include "device/plan_runner.hpp"

#include <numeric>
#include <string>
#include <utility>

#include "base/clock.hpp"

namespace r2ccl::device {
namespace {

// Numbers wrap past 0, which stands for a plan that is not captured.
std::uint16_t next_capture(std::uint16_t number) {
  return static_cast<std::uint16_t>(number == most_captures ? 1 : number + 1);
}

}  // namespace

std::uint32_t PlanRunner::add(Plan plan) {
  const std::lock_guard guard(mutex_);
  // All ranks capture the same plans in the same order, except those of two ranks.
  const bool of_all = plan.collective != Collective::send && plan.collective != Collective::recv;
  if (plan.captured && of_all) plan.capture = captures_ = next_capture(captures_);
  if (free_plans_.empty()) {
    plans_.push_back(std::move(plan));
    return static_cast<std::uint32_t>(plans_.size() - 1);
  }
  const std::uint32_t number = free_plans_.back();
  free_plans_.pop_back();
  plans_[number] = std::move(plan);
  return number;
}

Status PlanRunner::run(std::uint32_t number, Sequence sequence) {
  Plan plan;
  {
    const std::lock_guard guard(mutex_);
    if (number >= plans_.size())
      return {ErrorCode::internal,
              "plan " + std::to_string(number) +
                  " was posted; number of plans: " + std::to_string(plans_.size())};
    if (plans_[number].captured) {
      plan = plans_[number];
    } else {
      plan = std::move(plans_[number]);
      free_plans_.push_back(number);
    }
  }
  const Staging& staging = plan.direct ? context_.direct : context_.pinned;
  written_by_nics_ = plan.direct;
  Status status = carry_out(plan, staging.input(sequence), staging.result(sequence));
  // Ranks in a call of the other group would wait for this rank without an end.
  if (!status.ok() && context_.inter_node != nullptr) {
    context_.communicator.abort(status.message());
    context_.inter_node->abort(status.message());
  }
  return status;
}

Status PlanRunner::carry_out(const Plan& plan, std::byte* in, std::byte* out) {
  switch (plan.work) {
    case Work::call: break;
    case Work::begin_step: return begin_step(plan);
    case Work::end_step: return end_step();
  }
  // All ranks compare the number of calls on the communicator of all ranks.
  if (plan.inter_node) context_.communicator.count_call(plan.capture);
  return call(plan, in, out);
}

Status PlanRunner::begin_step(const Plan& plan) {
  R2CCL_TRY(context_.communicator.begin_step(plan.step, plan.about, /*compare=*/false));
  if (context_.inter_node == nullptr) return {};
  return context_.inter_node->begin_step(plan.step, plan.about, /*compare=*/false);
}

Status PlanRunner::end_step() {
  if (context_.inter_node != nullptr) R2CCL_TRY(context_.inter_node->end_step(/*compare=*/false));
  R2CCL_TRY(context_.communicator.end_step());
  steps_compared_.fetch_add(1, std::memory_order_release);
  return {};
}

Status PlanRunner::call(const Plan& plan, std::byte* in, std::byte* out) {
  const std::size_t count = plan.counts.front();
  const bool at_root = context_.communicator.rank() == plan.root;
  Communicator& ranks = among(plan);
  ranks.set_capture(plan.capture);
  const auto own = static_cast<std::size_t>(ranks.rank());
  switch (plan.collective) {
    case Collective::all_reduce:
      return ranks.all_reduce(in, out, count, plan.dtype, plan.op, plan.algorithm);
    case Collective::all_gather: {
      const std::size_t before =
          std::accumulate(plan.counts.begin(), plan.counts.begin() + ranks.rank(), std::size_t{0});
      return ranks.all_gatherv(out + before * size_of(plan.dtype), out, plan.counts, plan.dtype);
    }
    case Collective::reduce_scatter:
      if (plan.unreduced)
        return ranks.all_to_allv(in, plan.counts, out,
                                 std::vector(plan.counts.size(), plan.counts[own]), plan.dtype);
      return ranks.reduce_scatterv(in, out, plan.counts, plan.dtype, plan.op);
    case Collective::broadcast:
      return context_.communicator.broadcast(at_root ? in : out, count, plan.dtype, plan.root);
    case Collective::gather:
      return context_.communicator.gather(in, out, plan.counts, plan.dtype, plan.root);
    case Collective::send: return context_.communicator.send_to(in, count, plan.dtype, plan.root);
    case Collective::recv:
      return context_.communicator.receive_from(out, count, plan.dtype, plan.root);
    case Collective::all_to_all:
      return context_.communicator.all_to_allv(in, plan.counts, out, plan.counts, plan.dtype);
    case Collective::barrier: return context_.communicator.barrier();
  }
  return {ErrorCode::internal, "the posted plan has an unknown collective"};
}

Status PlanRunner::flush() {
  if (!written_by_nics_) return {};
  R2CCL_TRY(context_.direct_memory.host_view->failure());
  return context_.direct_memory.needs_flush ? context_.device.flush_writes() : Status();
}

Status PlanRunner::watch() {
  const Sequence left = load_acquire(context_.mailbox.left);
  if (load_acquire(context_.mailbox.entered) == left) {
    inside_since_ = 0;
    return {};
  }
  // A busy stream is inside an exchange at every look.  An exchange that ends begins a new wait.
  if (inside_since_ == 0 || left != inside_after_) inside_since_ = now_ns();
  inside_after_ = left;
  Status status = context_.communicator.check_waiting(inside_since_);
  if (status.ok()) return status;
  // Without the aborts, ranks of other nodes would wait for a collective that is never posted, and
  // ranks of this node would not know which rank gave up.
  context_.inter_node->abort(status.message());
  if (status.code() == ErrorCode::aborted) context_.communicator.abort(status.message());
  return status;
}

}  // namespace r2ccl::device
