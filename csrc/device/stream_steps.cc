// StreamCommunicator: the comparison of positions between ranks, in the order of the stream.
#include <chrono>
#include <thread>
#include <utility>

#include "base/interrupt.hpp"
#include "device/stream_communicator.hpp"

namespace r2ccl::device {
namespace {

using Clock = std::chrono::steady_clock;

// A comparison usually ends within a round trip.  The thread polls for this long, then sleeps.
constexpr std::chrono::microseconds poll_limit{200};
constexpr std::chrono::microseconds poll_interval{50};
constexpr std::chrono::milliseconds failure_interval{1};  // between two looks for a failure
constexpr std::chrono::nanoseconds interrupt_interval{interrupt_interval_ns};

}  // namespace

Status StreamCommunicator::begin_step(cuda::Stream stream, std::uint32_t step, std::string about,
                                      bool compare) {
  if (step == 0) return {ErrorCode::invalid_argument, "step: is 0; must be from 1 to 4294967295"};
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  if (communicator_.consensus() < Consensus::step) return {};
  if (compare) R2CCL_TRY(post_end(stream));
  R2CCL_TRY(post(stream, {.work = Work::begin_step, .step = step, .about = std::move(about)}));
  step_open_ = compare;
  return {};
}

Status StreamCommunicator::end_step(cuda::Stream stream) {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  return post_end(stream);
}

Status StreamCommunicator::post_end(cuda::Stream stream) {
  if (!step_open_) return {};
  R2CCL_TRY(post(stream, {.work = Work::end_step}));
  step_open_ = false;
  ++steps_ended_;
  return {};
}

// No kernel waits for the plan, so the stream goes on at once.
Status StreamCommunicator::post(cuda::Stream stream, Plan plan) {
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  if (capturing.value())
    return {ErrorCode::invalid_argument,
            "stream: is being captured; a step begins and ends outside of graphs"};
  return stage(stream, pinned_, {}, {0, 0, 1}, 0, runner_->add(std::move(plan)));
}

void StreamCommunicator::compare_captures() {
  communicator_.compare_captures();
  if (node_.inter_node() != nullptr) node_.inter_node()->compare_captures();
}

std::uint64_t StreamCommunicator::steps_ended() {
  const std::lock_guard guard(call_mutex_);
  return steps_ended_;
}

Status StreamCommunicator::await_steps(std::uint64_t steps) {
  const auto began = Clock::now();
  auto asked = began;
  auto next_look = began;
  while (runner_->steps_compared() < steps) {
    const auto now = Clock::now();
    if (now >= next_look) {
      next_look = now + failure_interval;
      R2CCL_TRY(failure_unless_busy());
    }
    if (now - asked >= interrupt_interval) {
      asked = now;
      if (interrupted())
        return {ErrorCode::aborted, "rank " + std::to_string(communicator_.rank()) +
                                        " was interrupted by a signal while communicator '" +
                                        communicator_.name() + "' compared steps"};
    }
    if (now - began < poll_limit)
      pause_briefly();
    else
      std::this_thread::sleep_for(poll_interval);
  }
  return failure();
}

}  // namespace r2ccl::device
