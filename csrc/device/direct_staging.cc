#include "device/direct_staging.hpp"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device/addresses.hpp"
#include "device/agreement.hpp"

namespace r2ccl::device {
namespace {

// Largest trial in bytes per rank: enough for several rails.
constexpr std::uint64_t most_tried = 1U << 20U;

Status another_cannot() { return {ErrorCode::invalid_argument, "not possible on another rank"}; }

}  // namespace

Status DirectStaging::open(Communicator& communicator, Communicator* inter_node,
                           const cuda::Device& device, std::uint64_t staging_bytes,
                           const DirectOptions& options) {
  communicator_ = &communicator;
  from_bytes_ = options.from_bytes;
  if (options.use == DirectOptions::Use::never) {
    failure_ = {ErrorCode::invalid_argument, "R2CCL_GPU_DIRECT is off"};
    return {};
  }
  Status among_all = communicator.check_direct();
  Status among_group = inter_node == nullptr
                           ? Status(ErrorCode::invalid_argument, "no exchange inside the node")
                           : inter_node->check_direct();
  Status staged =
      among_all.ok() || among_group.ok() ? register_memory(device, staging_bytes) : Status();
  // A rank that fails still takes part in every agreement, because the other ranks wait for it.
  const auto of_everybody = [&](Status& own) -> Result<bool> {
    auto all = agree(communicator, staged.ok() ? own : staged);
    if (all.ok() && !all.value() && own.ok()) own = another_cannot();
    return all;
  };
  for (const auto& [own, possible, ranks] : {std::tuple{&among_all, &among_all_, &communicator},
                                             std::tuple{&among_group, &inter_node_, inter_node}}) {
    auto all = of_everybody(*own);
    if (!all.ok()) return all.take_status();
    if (!all.value()) continue;
    // Drivers may report features that the platform lacks, so try a transfer.
    auto tried = try_out(*ranks, staging_bytes);
    if (!tried.ok()) return tried.take_status();
    if (!tried.value().empty())
      *own = {ErrorCode::invalid_argument, "in a trial, " + tried.value()};
    all = of_everybody(*own);
    if (!all.ok()) return all.take_status();
    *possible = all.value();
  }
  if (among_all_ || inter_node_) return {};

  withdraw();
  // With an exchange inside the node, only the inter-node group uses the rails, so report the
  // reason of that group.
  Status& why = inter_node == nullptr ? among_all : among_group;
  failure_ = staged.ok() ? std::move(why) : std::move(staged);
  if (options.use != DirectOptions::Use::always) return {};
  return {ErrorCode::invalid_argument,
          "gpu_direct: is on, but cannot be used: " + failure_.message()};
}

Status DirectStaging::register_memory(const cuda::Device& device, std::uint64_t staging_bytes) {
  const std::uint64_t entry_bytes = 2 * staging_bytes;
  auto made = make_direct_memory(device, ring * entry_bytes);
  if (!made.ok()) return made.take_status();
  R2CCL_TRY(communicator_->register_dma_buf(made.value().host_view->addresses(),
                                            std::move(made.value().dma_buf)));
  memory_ = std::move(made.value());
  buffers_.device = {at<std::byte>(memory_.memory.address()), entry_bytes, staging_bytes};
  buffers_.host = {memory_.host_view->addresses().data(), entry_bytes, staging_bytes};
  return {};
}

Result<std::string> DirectStaging::try_out(Communicator& ranks, std::uint64_t staging_bytes) {
  const auto size = static_cast<std::size_t>(ranks.size());
  const auto own = static_cast<std::size_t>(ranks.rank());
  const std::size_t each = std::min<std::uint64_t>(shard_bytes(staging_bytes, size), most_tried);
  const auto shard_of = [each](std::size_t rank) {
    std::vector<std::byte> shard(each);
    for (std::size_t i = 0; i < each; ++i)
      shard[i] = static_cast<std::byte>(i * 7 + i / 251 + rank);
    return shard;
  };
  std::byte* const all = buffers_.host.result(0);
  copy_bytes(all + own * each, shard_of(own).data(), each);
  const std::vector<Epoch> before = ranks.rdma_epochs();
  if (Status status = ranks.all_gatherv(all + own * each, all, std::vector(size, each), DType::u8);
      !status.ok())
    return Status(status.code(),
                  "GPUDirect trial (skipped with R2CCL_GPU_DIRECT=off): " + status.message());
  bool right = true;
  std::vector<std::byte> got(each);
  for (std::size_t rank = 0; rank < size; ++rank) {
    copy_bytes(got.data(), all + rank * each, each);
    right = right && got == shard_of(rank);
  }
  if (Status status = memory_.host_view->failure(); !status.ok()) return status.message();
  if (!right) return std::string("data written by NICs into GPU memory differs from the data sent");
  const std::vector<Epoch> after = ranks.rdma_epochs();
  // Compare only rails connected before the trial: other rails may have connected meanwhile.
  bool same = true;
  for (std::size_t i = 0; i < before.size(); ++i)
    same = same && (before[i] == 0 || before[i] == after[i]);
  if (!same) return std::string("rails were lost while NICs accessed GPU memory");
  return std::string();
}

void DirectStaging::withdraw() {
  if (memory_.host_view)
    (void)communicator_->deregister_buffer(memory_.host_view->addresses().data());
  memory_.host_view.reset();
  memory_.memory = {};
}

}  // namespace r2ccl::device
