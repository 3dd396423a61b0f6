// A StreamCommunicator's part in the exchange inside its node.
#include <algorithm>
#include <array>

#include "device/addresses.hpp"
#include "device/stream_communicator.hpp"

namespace r2ccl::device {
namespace {

// Where parts begin that lie one after the other.
template <typename BytesOf>
std::vector<std::uint64_t> starts(std::span<const std::size_t> counts, const BytesOf& bytes_of) {
  std::vector<std::uint64_t> made;
  std::uint64_t next = 0;
  for (const std::size_t count : counts) {
    made.push_back(next);
    next += bytes_of(count);
  }
  return made;
}

}  // namespace

// ---- collectives ----

Status StreamCommunicator::in_node(cuda::Stream stream, const Plan& plan, cuda::Address in,
                                   cuda::Address out) {
  const std::lock_guard guard(call_mutex_);
  auto capturing = begin(stream);
  if (!capturing.ok()) return capturing.take_status();
  if (plan.collective == Collective::all_reduce)
    return all_reduce_in_node(stream, plan, in, out, capturing.value());
  if (plan.collective == Collective::all_gather)
    return all_gather_in_node(stream, plan, in, out, capturing.value());
  return reduce_scatter_in_node(stream, plan, in, out, capturing.value());
}

Status StreamCommunicator::all_reduce_in_node(cuda::Stream stream, const Plan& plan,
                                              cuda::Address in, cuda::Address out, bool capturing) {
  const std::size_t element = size_of(plan.dtype);
  const std::size_t count = plan.counts.front();
  const std::uint32_t own = node_.own_place();
  const auto nodes = static_cast<std::uint32_t>(node_.nodes().size());
  const bool two = nodes == 2;
  Plan posted = plan;
  posted.in_column = true;
  posted.direct = direct_.adds_up(
      direct_.in_column(), count * element / node_.ranks() / (two ? 1 : nodes), plan.op, nodes);
  // Of two nodes both get all shares, and add them up alone; of more each a share of the share.
  posted.apart = posted.direct && !two;
  if (posted.direct) posted.collective = two ? Collective::all_gather : Collective::reduce_scatter;
  Exchange& exchange = node_.through(posted.direct);
  const std::uint64_t piece_of = posted.direct ? piece_bytes(2) : staging_bytes_;
  const auto shares_of = [&](const Piece& piece) {
    return Shares::of(piece.of(count), element, exchange.node.ranks);
  };
  const auto rows_of_share = [&](const Shares& shares, std::uint32_t rank) {
    return Rows{1, shares.size(rank) * element, 0, 0, shares.first(rank) * element};
  };
  const auto post = [&](const Piece& piece) {
    const Shares shares = shares_of(piece);
    const std::size_t mine = shares.size(own);
    posted.counts = {mine};
    if (posted.direct && two) posted.counts = {mine, mine};
    if (posted.apart) {
      const Shares of_share = Shares::of(mine, element, nodes);
      posted.counts.clear();
      for (std::uint32_t node = 0; node < nodes; ++node)
        posted.counts.push_back(of_share.size(node));
    }
    const Piece all{0, mine, element};
    R2CCL_TRY(share(stream, {in, {&count, 1}}, piece));
    std::vector<Rows> rows{rows_of_share(shares, own)};
    if (posted.direct && two) rows[0].offset = place_of_own(posted, all);
    if (posted.apart) {
      const Shares of_share = Shares::of(mine, element, nodes);
      const auto me = static_cast<std::uint32_t>(node_.column()->rank());
      rows.insert(rows.begin(), in_place(me, of_share.size(me) * element,
                                         rows[0].first + of_share.first(me) * element));
    }
    return sum_up(stream, exchange, rows, plan, add_plan(posted, capturing, all));
  };
  const auto receive = [&](const Piece& piece, std::uint32_t lag) {
    const Shares shares = shares_of(piece);
    const std::uint64_t bytes = shares.size(own) * element;
    Results results{};
    for (std::uint32_t rank = 0; rank < exchange.node.ranks; ++rank)
      results.of[rank] = rows_of_share(shares, rank);
    const Sum sum = posted.direct && two ? Sum{nodes, plan.dtype, plan.op, bytes} : Sum();
    R2CCL_TRY(spread(stream, exchange, bytes, sum, lag));
    return collect(stream, {&results, 1}, out + piece.first * element, piece.bytes_of(count), lag);
  };
  if (!posted.apart) return in_pieces(count, piece_of / element, element, post, receive);
  const std::size_t most = piece_of / element;
  for (std::size_t first = 0; first < count; first += most) {
    const Piece piece{first, most, element};
    R2CCL_TRY(post(piece));
    R2CCL_TRY(combine(stream, posted, capturing));
    R2CCL_TRY(receive(piece, 0));
  }
  return {};
}

Status StreamCommunicator::all_gather_in_node(cuda::Stream stream, const Plan& plan,
                                              cuda::Address in, cuda::Address out, bool capturing) {
  const std::size_t element = size_of(plan.dtype);
  const std::size_t largest = *std::ranges::max_element(plan.counts);
  const std::size_t mine = own(plan.counts).front();
  Plan posted = in_column(plan);
  posted.direct = direct_.goes(direct_.in_column(), largest * element);
  Exchange& exchange = node_.through(posted.direct);
  return in_pieces(
      largest, piece_bytes(node_.nodes().size()) / element, element,
      [&](const Piece& piece) {
        const auto* source = at<const std::byte>(in + piece.first * element);
        std::uint64_t bytes = piece.bytes_of(mine);
        std::uint64_t offset = place_of_own(posted, piece) - staging_bytes_;
        std::uint32_t number = add_plan(posted, capturing, piece);
        std::array<void*, 5> arguments{&exchange, &source, &bytes, &offset, &number};
        return launch(bring_kernel_, stream, bytes, arguments.data());
      },
      [&](const Piece& piece, std::uint32_t lag) {
        std::uint64_t bytes = 0;
        for (const std::size_t count : posted.counts) bytes += piece.bytes_of(count);
        R2CCL_TRY(spread(stream, exchange, bytes, Sum(), lag));
        const auto first_bytes =
            starts(plan.counts, [&](std::size_t count) { return count * element; });
        std::vector<Results> results;
        for (std::size_t place = 0; place < exchange.node.ranks; ++place) {
          const auto rows = rows_of(node_.column_of(place), first_bytes, plan.counts, piece);
          results.resize(std::max(results.size(), rows.size()), Results{});
          for (std::size_t i = 0; i < rows.size(); ++i) results[i].of[place] = rows[i];
        }
        return collect(stream, results, out + piece.first * element, bytes * exchange.node.ranks,
                       lag);
      });
}

Status StreamCommunicator::reduce_scatter_in_node(cuda::Stream stream, const Plan& plan,
                                                  cuda::Address in, cuda::Address out,
                                                  bool capturing) {
  const std::size_t element = size_of(plan.dtype);
  const std::size_t largest = *std::ranges::max_element(plan.counts);
  const std::size_t mine = own(plan.counts).front();
  const auto nodes = static_cast<std::uint32_t>(node_.nodes().size());
  Plan posted = in_column(plan);
  posted.direct = posted.apart =
      direct_.adds_up(direct_.in_column(), largest * element, plan.op, nodes);
  Exchange& exchange = node_.through(posted.direct);
  return in_pieces(
      largest, piece_bytes(plan.counts.size()) / element, element,
      [&](const Piece& piece) {
        R2CCL_TRY(share(stream, {in, plan.counts}, piece));
        const auto first_bytes =  // as copies() puts them
            starts(plan.counts, [&](std::size_t count) { return piece.bytes_of(count); });
        auto rows = rows_of(node_.column_of(exchange.node.own), first_bytes, plan.counts, piece);
        if (posted.apart)
          rows.insert(
              rows.begin(),
              in_place(static_cast<std::uint32_t>(node_.column()->rank()), piece.bytes_of(mine),
                       first_bytes[static_cast<std::size_t>(communicator_.rank())]));
        return sum_up(stream, exchange, rows, plan, add_plan(posted, capturing, piece));
      },
      [&](const Piece& piece, std::uint32_t lag) {
        auto* target = at<std::byte>(out + piece.first * element);
        std::uint64_t bytes = piece.bytes_of(mine);
        Sum sum = posted.apart ? Sum{nodes, plan.dtype, plan.op, bytes} : Sum();
        std::array<void*, 5> arguments{&exchange, &target, &bytes, &sum, &lag};
        return launch(take_kernel_, stream, bytes, arguments.data());
      });
}

// ---- their kernels ----

Status StreamCommunicator::share(cuda::Stream stream, const Parts& in, const Piece& piece) {
  std::vector<Copy> parts = copies(in, piece);
  if (parts.empty()) parts.emplace_back();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto* source = at<const std::byte>(parts[i].address);
    Rows rows = parts[i].rows;
    bool last = i + 1 == parts.size();
    std::array<void*, 4> arguments{&node_.through(false), &source, &rows, &last};
    R2CCL_TRY(launch(share_kernel_, stream, rows.count * rows.bytes, arguments.data()));
  }
  return {};
}

Status StreamCommunicator::sum_up(cuda::Stream stream, Exchange& exchange,
                                  std::span<const Rows> rows, const Plan& plan,
                                  std::uint32_t number) {
  DType dtype = plan.dtype;
  ReduceOp op = plan.op;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Rows each = rows[i];
    bool last = i + 1 == rows.size();
    std::array<void*, 6> arguments{&exchange, &each, &dtype, &op, &number, &last};
    R2CCL_TRY(
        launch(sum_up_kernel_, stream, each.count * each.bytes * node_.ranks(), arguments.data()));
  }
  return {};
}

Status StreamCommunicator::spread(cuda::Stream stream, Exchange& exchange, std::uint64_t bytes,
                                  Sum sum, std::uint32_t lag) {
  std::array<void*, 4> arguments{&exchange, &bytes, &sum, &lag};
  return launch(spread_kernel_, stream, bytes, arguments.data());
}

Status StreamCommunicator::collect(cuda::Stream stream, std::span<const Results> results,
                                   cuda::Address out, std::uint64_t bytes, std::uint32_t lag) {
  auto* target = at<std::byte>(out);
  for (std::size_t i = 0; i < results.size(); ++i) {
    Results each = results[i];
    bool last = i + 1 == results.size();
    std::array<void*, 5> arguments{&node_.through(false), &each, &target, &lag, &last};
    R2CCL_TRY(launch(collect_kernel_, stream, bytes / results.size(), arguments.data()));
  }
  return {};
}

Plan StreamCommunicator::in_column(const Plan& plan) const {
  Plan made = plan;
  made.in_column = true;
  made.counts.clear();
  for (const int rank : node_.column_of(node_.own_place()))
    made.counts.push_back(plan.counts[static_cast<std::size_t>(rank)]);
  return made;
}

std::vector<Rows> StreamCommunicator::rows_of(std::span<const int> ranks,
                                              std::span<const std::uint64_t> first_bytes,
                                              std::span<const std::size_t> counts,
                                              const Piece& piece) {
  std::vector<Rows> rows;
  std::uint64_t offset = 0;
  for (const int rank : ranks) {
    const auto of = static_cast<std::size_t>(rank);
    const std::uint64_t bytes = piece.bytes_of(counts[of]);
    rows.push_back({1, bytes, 0, offset, first_bytes[of]});
    offset += bytes;
  }
  // Of the same size, and as far from each other, they are one.
  Rows all = rows.front();
  all.count = rows.size();
  all.pitch = rows.size() > 1 ? rows[1].first - all.first : 0;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i].bytes != all.bytes || rows[i].first != all.first + i * all.pitch) return rows;
  return {all};
}

Status StreamCommunicator::depart() {
  std::array<void*, 1> departing{&node_.through(false)};
  R2CCL_TRY(launch(depart_kernel_, nullptr, 0, departing.data()));
  return device_->synchronise();
}

}  // namespace r2ccl::device
