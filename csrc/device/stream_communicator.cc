#include "device/stream_communicator.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "base/first_number.hpp"
#include "collectives/collectives.hpp"
#include "device/addresses.hpp"

namespace r2ccl::device {
namespace {

constexpr unsigned threads_per_block = 256;
// Smallest share of a block; a block with less data costs more to start than to run.
constexpr std::uint64_t bytes_per_block = 64U << 10U;
constexpr std::uint64_t smallest_staging = 4096;

Status copied(const Status& status) {
  if (status.ok()) return {};
  return {status.code(), status.message()};
}

}  // namespace

Result<std::unique_ptr<StreamCommunicator>> StreamCommunicator::create(
    Communicator& communicator, const StreamOptions& options) {
  const auto ranks = static_cast<std::uint64_t>(communicator.size());
  if (options.staging_bytes < smallest_staging * ranks)
    return Status(ErrorCode::invalid_argument,
                  "staging_bytes: " + std::to_string(options.staging_bytes) + "; " +
                      std::to_string(ranks) + " ranks need " +
                      std::to_string(smallest_staging * ranks));
  std::unique_ptr<StreamCommunicator> made(new StreamCommunicator(communicator, options));
  if (Status status = made->open(options); !status.ok()) return status;
  return made;
}

StreamCommunicator::StreamCommunicator(Communicator& communicator, const StreamOptions& options)
    : communicator_(communicator), staging_bytes_(rounded_up(options.staging_bytes)) {}

Status StreamCommunicator::open(const StreamOptions& options) {
  auto device = cuda::Device::open(options.library, options.device, options.image);
  if (!device.ok()) return device.take_status();
  device_ = std::move(device.value());
  for (const auto& [name, kernel] :
       {std::pair{"r2ccl_stage", &stage_kernel_}, std::pair{"r2ccl_deliver", &deliver_kernel_},
        std::pair{"r2ccl_publish_input", &publish_input_kernel_},
        std::pair{"r2ccl_local_reduce_scatter", &local_reduce_scatter_kernel_},
        std::pair{"r2ccl_stage_in_place", &stage_in_place_kernel_},
        std::pair{"r2ccl_publish_result", &publish_result_kernel_},
        std::pair{"r2ccl_local_all_gather", &local_all_gather_kernel_},
        std::pair{"r2ccl_deliver_shard", &deliver_shard_kernel_},
        std::pair{"r2ccl_quiesce", &quiesce_kernel_},
        std::pair{"r2ccl_reduce_and_deliver", &reduce_and_deliver_kernel_},
        std::pair{"r2ccl_reduce_and_post", &reduce_and_post_kernel_}}) {
    auto found = device_->kernel(name);
    if (!found.ok()) return found.take_status();
    *kernel = found.value();
  }
  const std::uint64_t entry_bytes = 2 * staging_bytes_;
  auto words = device_->allocate_pinned(sizeof(Mailbox));
  if (!words.ok()) return words.take_status();
  auto state = device_->allocate(sizeof(DeviceState));
  if (!state.ok()) return state.take_status();
  auto staging = device_->allocate_pinned(ring * entry_bytes);
  if (!staging.ok()) return staging.take_status();
  mailbox_memory_ = std::move(words.value());
  state_memory_ = std::move(state.value());
  staging_memory_ = std::move(staging.value());
  pinned_.device = {at<std::byte>(staging_memory_.address()), entry_bytes, staging_bytes_};
  pinned_.host = {staging_memory_.host(), entry_bytes, staging_bytes_};
  R2CCL_TRY(begin_numbers());
  if (options.node.inter_node != nullptr)
    R2CCL_TRY(node_.open(communicator_, *device_, options.node,
                         {.mailbox = at<Mailbox>(mailbox_memory_.address()),
                          .state = at<DeviceState>(state_memory_.address()),
                          .staging = pinned_.device,
                          .node = {}}));
  R2CCL_TRY(
      direct_.open(communicator_, node_.inter_node(), *device_, staging_bytes_, options.direct));
  node_.stage_directly(direct_.buffers().device);
  runner_ = std::make_unique<PlanRunner>(PlanRunner::Context{.mailbox = mailbox(),
                                                             .communicator = communicator_,
                                                             .inter_node = node_.inter_node(),
                                                             .pinned = pinned_.host,
                                                             .direct = direct_.buffers().host,
                                                             .direct_memory = direct_.memory(),
                                                             .device = *device_});
  ProxyOptions proxy = options.proxy;
  if (node_.active()) proxy.watch = [runner = runner_.get()] { return runner->watch(); };
  proxy.on_exception = [this](const Status& why) {
    communicator_.abort(why.message());
    if (node_.active()) node_.inter_node()->abort(why.message());
  };
  Proxy::Flush flush;
  if (direct_.memory().host_view) flush = [runner = runner_.get()] { return runner->flush(); };
  auto made = std::make_unique<Proxy>(
      mailbox(),
      [runner = runner_.get()](std::uint32_t plan, Sequence sequence) {
        return runner->run(plan, sequence);
      },
      std::move(flush), proxy);
  R2CCL_TRY(made->start());
  proxy_ = std::move(made);
  return {};
}

StreamCommunicator::~StreamCommunicator() { close(); }

void StreamCommunicator::close() {
  if (origin_.foreign()) {
    (void)proxy_.release();  // the proxy's thread does not exist in a forked child
    return;
  }
  const std::lock_guard guard(call_mutex_);
  if (proxy_ == nullptr) {  // already closed, or never opened
    direct_.withdraw();
    return;
  }
  // Waiting kernels end with their collectives, or with the abort word.
  Status status = device_->synchronise();
  if (node_.active() && status.ok()) status = quiesce();
  if (whole().ok()) closed_ = std::move(status);
  if (closed_.ok()) closed_ = whole();
  // Kernels of local peers signal the loss to this rank's memory, perhaps later.
  if (!closed_.ok()) node_.keep_memory();
  // Proxies of this rank and other ranks may wait for collectives that are never posted.
  if (!closed_.ok()) {
    communicator_.abort(closed_.message());
    if (node_.active()) node_.inter_node()->abort(closed_.message());
  }
  if (closed_.ok())
    closed_ = {ErrorCode::invalid_argument,
               "communicator '" + communicator_.name() + "' has been closed"};
  proxy_.reset();
  direct_.withdraw();
}

Status StreamCommunicator::failure() {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  if (proxy_ == nullptr) return copied(closed_);
  return whole();
}

Status StreamCommunicator::failure_unless_busy() {
  R2CCL_TRY(check_origin());
  const std::unique_lock lock(call_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return {};
  return proxy_ == nullptr ? copied(closed_) : whole();
}

Status StreamCommunicator::whole() const {
  if (Status failed = proxy_->failure(); !failed.ok()) return failed;
  if (load_acquire(mailbox().lost) != 0)
    return {ErrorCode::aborted, "a rank of this node gets no more results"};
  return {};
}

Mailbox& StreamCommunicator::mailbox() const {
  return *reinterpret_cast<Mailbox*>(mailbox_memory_.host());
}

Status StreamCommunicator::wake() {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  if (proxy_ != nullptr) proxy_->wake();
  return {};
}

// ---- calls ----

Status StreamCommunicator::all_reduce(cuda::Stream stream, cuda::Address in, cuda::Address out,
                                      std::size_t count, DType dtype, ReduceOp op,
                                      Algorithm algorithm) {
  if (op == ReduceOp::avg && dtype == DType::boolean)
    return {ErrorCode::invalid_argument, "op: avg is not defined for bool"};
  const Plan plan{.collective = Collective::all_reduce,
                  .dtype = dtype,
                  .op = op,
                  .algorithm = algorithm,
                  .counts = {count}};
  // An average is divided once, after the sum over all ranks, so avg does not use the exchange.
  if (node_.active() && op != ReduceOp::avg) return in_node(stream, plan, in, out);
  const auto ranks = static_cast<std::size_t>(communicator_.size());
  const std::uint64_t sent = count * size_of(dtype) / (ranks == 2 ? 1 : ranks);
  if (direct_.adds_up(direct_.among_all(), sent, op, ranks))
    return all_reduce_direct(stream, plan, in, out);
  return enqueue(stream, plan, {in, {&count, 1}}, {out, {&count, 1}});
}

Status StreamCommunicator::all_gatherv(cuda::Stream stream, cuda::Address in, cuda::Address out,
                                       std::span<const std::size_t> counts, DType dtype) {
  R2CCL_TRY(communicator_.check_counts("sizes", counts));
  const Plan plan{.collective = Collective::all_gather,
                  .dtype = dtype,
                  .counts = {counts.begin(), counts.end()}};
  if (node_.active()) return in_node(stream, plan, in, out);
  return enqueue(stream, plan, {in, own(counts)}, {out, counts});
}

Status StreamCommunicator::reduce_scatterv(cuda::Stream stream, cuda::Address in, cuda::Address out,
                                           std::span<const std::size_t> counts, DType dtype,
                                           ReduceOp op) {
  R2CCL_TRY(communicator_.check_counts("sizes", counts));
  if (op == ReduceOp::avg && dtype == DType::boolean)
    return {ErrorCode::invalid_argument, "op: avg is not defined for bool"};
  const Plan plan{.collective = Collective::reduce_scatter,
                  .dtype = dtype,
                  .op = op,
                  .counts = {counts.begin(), counts.end()}};
  if (node_.active() && op != ReduceOp::avg) return in_node(stream, plan, in, out);
  if (direct_.adds_up(direct_.among_all(), *std::ranges::max_element(counts) * size_of(dtype), op,
                      counts.size()))
    return reduce_scatter_direct(stream, plan, in, out);
  return enqueue(stream, plan, {in, counts}, {out, own(counts)});
}

Status StreamCommunicator::broadcast(cuda::Stream stream, cuda::Address data, std::size_t count,
                                     DType dtype, int root) {
  R2CCL_TRY(communicator_.check_rank("root", root));
  const Shards all{data, {&count, 1}};
  const bool gives = communicator_.rank() == root;
  return enqueue(
      stream,
      {.collective = Collective::broadcast, .dtype = dtype, .root = root, .counts = {count}},
      gives ? all : Shards(), gives ? Shards() : all);
}

Status StreamCommunicator::gather(cuda::Stream stream, cuda::Address in, cuda::Address out,
                                  std::span<const std::size_t> counts, DType dtype, int root) {
  R2CCL_TRY(communicator_.check_rank("root", root));
  R2CCL_TRY(communicator_.check_counts("sizes", counts));
  return enqueue(stream,
                 {.collective = Collective::gather,
                  .dtype = dtype,
                  .root = root,
                  .counts = {counts.begin(), counts.end()}},
                 {in, own(counts)}, communicator_.rank() == root ? Shards{out, counts} : Shards());
}

Status StreamCommunicator::all_to_all(cuda::Stream stream, cuda::Address in, cuda::Address out,
                                      std::size_t count, DType dtype) {
  const std::vector<std::size_t> counts(static_cast<std::size_t>(communicator_.size()), count);
  return enqueue(stream, {.collective = Collective::all_to_all, .dtype = dtype, .counts = counts},
                 {in, counts}, {out, counts});
}

Status StreamCommunicator::send_to(cuda::Stream stream, cuda::Address data, std::size_t count,
                                   DType dtype, int peer) {
  R2CCL_TRY(communicator_.check_rank("dst", peer));
  if (peer == communicator_.rank())
    return {ErrorCode::invalid_argument, "dst: is this rank itself"};
  return enqueue(stream,
                 {.collective = Collective::send, .dtype = dtype, .root = peer, .counts = {count}},
                 {data, {&count, 1}}, {});
}

Status StreamCommunicator::receive_from(cuda::Stream stream, cuda::Address data, std::size_t count,
                                        DType dtype, int peer) {
  R2CCL_TRY(communicator_.check_rank("src", peer));
  if (peer == communicator_.rank())
    return {ErrorCode::invalid_argument, "src: is this rank itself"};
  return enqueue(stream,
                 {.collective = Collective::recv, .dtype = dtype, .root = peer, .counts = {count}},
                 {}, {data, {&count, 1}});
}

Status StreamCommunicator::barrier(cuda::Stream stream) {
  // An empty shard makes the stream wait for the arrival of the collective.
  constexpr std::size_t nothing = 0;
  return enqueue(stream, {.collective = Collective::barrier, .counts = {nothing}}, {},
                 {0, {&nothing, 1}});
}

std::span<const std::size_t> StreamCommunicator::own(std::span<const std::size_t> counts) const {
  return counts.subspan(static_cast<std::size_t>(communicator_.rank()), 1);
}

// ---- into the stream ----

Status StreamCommunicator::enqueue(cuda::Stream stream, const Plan& plan, const Shards& in,
                                   const Shards& out) {
  R2CCL_TRY(check_origin());
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  const std::size_t element = size_of(plan.dtype);
  const std::size_t largest = *std::ranges::max_element(plan.counts);
  const std::size_t most = slice_bytes(plan.counts.size()) / element;
  const bool adds_up =
      plan.collective == Collective::all_reduce || plan.collective == Collective::reduce_scatter;
  Plan posted = plan;
  // In a broadcast tree, a rank forwards data written by NICs before any flush, so trees do not use
  // GPUDirect.
  const bool tree =
      plan.collective == Collective::broadcast && communicator_.size() > largest_flat_broadcast;
  posted.direct = !adds_up && !tree && direct_.goes(direct_.among_all(), largest * element);
  Buffers& at = posted.direct ? direct_.buffers() : pinned_;
  return in_slices(
      largest, most, element,
      [&](const Slice& slice) {
        const std::uint64_t offset =
            plan.collective == Collective::all_gather ? own_offset(plan, slice) : 0;
        if (posted.direct && plan.collective == Collective::all_to_all) {
          const auto me = static_cast<std::uint32_t>(communicator_.rank());
          const cuda::Address shard = in.address + (me * largest + slice.first) * element;
          R2CCL_TRY(copy_own_shard(stream, shard, me, slice.bytes_of(largest)));
        }
        return stage(stream, at, in, slice, offset, add_plan(posted, capturing.value(), slice));
      },
      [&](const Slice& slice, std::uint32_t lag) { return deliver(stream, at, out, slice, lag); });
}

Result<bool> StreamCommunicator::begin(cuda::Stream stream) {
  if (proxy_ == nullptr) return copied(closed_);
  if (Status status = whole(); !status.ok()) return status;
  auto capturing = device_->capturing(stream);
  if (capturing.ok()) proxy_->wake();
  return capturing;
}

Status StreamCommunicator::gather_slots(cuda::Stream stream, cuda::Address in, std::size_t count,
                                        DType dtype) {
  const auto ranks = static_cast<std::size_t>(communicator_.size());
  if (count * size_of(dtype) > slice_bytes(ranks))
    return {ErrorCode::invalid_argument, "tensor: " + std::to_string(count * size_of(dtype)) +
                                             " bytes; a slot has " +
                                             std::to_string(slice_bytes(ranks))};
  return enqueue(stream,
                 {.collective = Collective::all_gather,
                  .dtype = dtype,
                  .counts = std::vector<std::size_t>(ranks, count)},
                 {in, {&count, 1}}, {});
}

StreamCommunicator::Slots StreamCommunicator::slots() const {
  return {
      .base = staging_memory_.address() + staging_bytes_,
      .direct_base = direct_.among_all() ? direct_.memory().memory.address() + staging_bytes_ : 0,
      .direct_from = direct_.from_bytes(),
      .entry_bytes = pinned_.device.entry_bytes,
      .most_bytes = slice_bytes(static_cast<std::size_t>(communicator_.size())),
      .sequence = state_memory_.address() + offsetof(DeviceState, sequence),
      .arrived = &mailbox().arrived,
      .abort = &mailbox().abort};
}

// Tests begin close to the wrap of the sequences.
Status StreamCommunicator::begin_numbers() {
  new (mailbox_memory_.host()) Mailbox;
  const auto first = static_cast<Sequence>(first_number());
  if (first == 0) return {};
  auto copier = device_->make_copier();
  if (!copier.ok()) return copier.take_status();
  const DeviceState begun{.sequence = first, .exchange = first, .reports = 0};
  std::memcpy(mailbox_memory_.host(), &begun, sizeof(begun));
  R2CCL_TRY(
      copier.value()->copy(state_memory_.address(), mailbox_memory_.address(), sizeof(begun)));
  auto* mailbox = new (mailbox_memory_.host()) Mailbox;
  for (Word* word : {&mailbox->posted, &mailbox->arrived, &mailbox->entered, &mailbox->left})
    word->value = first;
  return {};
}

std::uint64_t StreamCommunicator::slice_bytes(std::size_t shards) const {
  return shard_bytes(staging_bytes_, shards);
}

std::vector<StreamCommunicator::Copy> StreamCommunicator::copies(const Shards& shards,
                                                                 const Slice& slice) {
  std::vector<Copy> found;
  const auto alike = [&](std::size_t count) { return count == shards.counts.front(); };
  if (std::ranges::all_of(shards.counts, alike) && !shards.counts.empty()) {
    const std::size_t count = shards.counts.front();
    found.push_back({shards.address + slice.first * slice.element,
                     {shards.counts.size(), slice.bytes_of(count), count * slice.element, 0}});
    return found;
  }
  cuda::Address address = shards.address;
  std::uint64_t offset = 0;
  for (const std::size_t count : shards.counts) {
    const std::uint64_t bytes = slice.bytes_of(count);
    if (bytes > 0)
      found.push_back({address + slice.first * slice.element, {1, bytes, bytes, offset}});
    address += count * slice.element;
    offset += bytes;
  }
  return found;
}

Status StreamCommunicator::stage(cuda::Stream stream, Buffers& buffers, const Shards& in,
                                 const Slice& slice, std::uint64_t offset, std::uint32_t plan) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  std::vector<Copy> shards = copies(in, slice);
  if (shards.empty()) shards.emplace_back();  // no data to stage, but a collective to post
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto* source = at<const std::byte>(shards[i].address);
    shards[i].rows.offset += offset;
    bool last = i + 1 == shards.size();
    std::array<void*, 7> arguments{&mailbox, &state, &buffers.device, &source, &shards[i].rows,
                                   &plan,    &last};
    R2CCL_TRY(launch(stage_kernel_, stream, shards[i].rows.count * shards[i].rows.bytes,
                     arguments.data()));
  }
  return {};
}

Status StreamCommunicator::deliver(cuda::Stream stream, Buffers& buffers, const Shards& out,
                                   const Slice& slice, std::uint32_t lag) {
  auto* mailbox = at<Mailbox>(mailbox_memory_.address());
  auto* state = at<DeviceState>(state_memory_.address());
  for (Copy& copy : copies(out, slice)) {
    auto* target = at<std::byte>(copy.address);
    std::array<void*, 6> arguments{&mailbox, &state, &buffers.device, &target, &copy.rows, &lag};
    R2CCL_TRY(launch(deliver_kernel_, stream, copy.rows.count * copy.rows.bytes, arguments.data()));
  }
  return {};
}

Status StreamCommunicator::launch(cuda::Function kernel, cuda::Stream stream, std::uint64_t bytes,
                                  void** arguments) {
  const auto blocks =
      static_cast<unsigned>(std::clamp<std::uint64_t>(bytes / bytes_per_block, 1, max_blocks));
  return device_->launch(kernel, blocks, threads_per_block, stream, arguments);
}

// ---- plans ----

std::uint32_t StreamCommunicator::add_plan(const Plan& plan, bool captured, const Slice& of) {
  Plan slice = plan;
  slice.captured = captured;
  for (std::size_t& count : slice.counts) count = of.of(count);
  return runner_->add(std::move(slice));
}

}  // namespace r2ccl::device
