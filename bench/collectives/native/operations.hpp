// Buffers of each op at a rank: number of input and output elements, input values, and the
// expected result. ../operations.py has the same definitions for the Python contenders.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace r2serve::bench {

inline constexpr int kRoot = 0;

// Returns a rank's input value at `index`. Sums over a few ranks are exact in every dtype of the
// benchmark.
inline int pattern(std::size_t index, int rank) {
  return (rank + 1) * (static_cast<int>(index % 13) + 1);
}

inline int pattern_sum(std::size_t index, int ranks) {
  return ranks * (ranks + 1) / 2 * (static_cast<int>(index % 13) + 1);
}

// Splits `total` elements into uneven shards of 1, 2, ... parts. The last shard takes the
// remainder.
inline std::vector<std::size_t> shares(std::size_t total, std::size_t ranks) {
  const std::size_t parts = ranks * (ranks + 1) / 2;
  std::vector<std::size_t> result;
  std::size_t left = total;
  for (std::size_t index = 0; index + 1 < ranks; ++index) {
    result.push_back(total * (index + 1) / parts);
    left -= result.back();
  }
  result.push_back(left);
  return result;
}

// Returns the number of elements sent by `rank` to each rank in an all_to_allv of `total` elements
// per rank.
inline std::vector<std::size_t> sent(std::size_t total, std::size_t ranks, std::size_t rank) {
  const auto even = shares(total, ranks);
  std::vector<std::size_t> result;
  for (std::size_t peer = 0; peer < ranks; ++peer) result.push_back(even[(rank + peer) % ranks]);
  return result;
}

// Returns the offsets of consecutive parts, in elements.
inline std::vector<std::size_t> starts(const std::vector<std::size_t>& sizes) {
  std::vector<std::size_t> result;
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    result.push_back(at);
    at += size;
  }
  return result;
}

// An op with `count` elements per rank (all_gatherv: on average), from the view of `rank`.
class Operation {
 public:
  Operation() = default;
  Operation(std::string_view op, std::size_t count, int rank, int ranks)
      : op_(op),
        count_(count),
        rank_(static_cast<std::size_t>(rank)),
        ranks_(static_cast<std::size_t>(ranks)) {
    if (op == "all_gatherv") {
      gathered_ = shares(count * ranks_, ranks_);
    } else if (op == "reduce_scatterv") {
      scattered_ = shares(count, ranks_);
    } else if (op == "all_to_allv") {
      exchanged_ = sent(count, ranks_, rank_);
    }
  }

  bool in_place() const { return op_ == "all_reduce" || op_ == "broadcast" || op_ == "barrier"; }

  std::size_t input() const { return op_ == "all_gatherv" ? gathered_[rank_] : count_; }

  std::size_t output() const {
    if (op_ == "all_gather" || op_ == "all_gatherv") return count_ * ranks_;
    if (op_ == "gather") return rank_ == kRoot ? count_ * ranks_ : 0;
    if (op_ == "reduce_scatter") return count_ / ranks_;
    if (op_ == "reduce_scatterv") return scattered_[rank_];
    return in_place() ? 0 : count_;  // all_to_all, all_to_allv, send_recv
  }

  // Shard sizes by rank, in elements. `gathered` describes the output, `scattered` the input, and
  // `exchanged` both.
  const std::vector<std::size_t>& gathered() const { return gathered_; }
  const std::vector<std::size_t>& scattered() const { return scattered_; }
  const std::vector<std::size_t>& exchanged() const { return exchanged_; }

  // Calls `take(value)` with each expected element of the result, in order. The result is the
  // input buffer if the op is in place, else the output buffer.
  template <typename Take>
  void expected(Take take) const {
    const auto all = static_cast<int>(ranks_);
    const auto from = [&](std::size_t peer, std::size_t begin, std::size_t size) {
      for (std::size_t i = begin; i < begin + size; ++i) take(pattern(i, static_cast<int>(peer)));
    };
    const auto sum = [&](std::size_t begin, std::size_t size) {
      for (std::size_t i = begin; i < begin + size; ++i) take(pattern_sum(i, all));
    };
    if (op_ == "all_reduce") {
      sum(0, count_);
    } else if (op_ == "reduce_scatter") {
      sum(rank_ * (count_ / ranks_), count_ / ranks_);
    } else if (op_ == "reduce_scatterv") {
      sum(starts(scattered_)[rank_], scattered_[rank_]);
    } else if (op_ == "broadcast" || op_ == "send_recv") {
      from(kRoot, 0, count_);
    } else if (op_ == "gather" && rank_ != kRoot) {
      return;
    } else {
      for (std::size_t peer = 0; peer < ranks_ && op_ != "barrier"; ++peer) {
        if (op_ == "all_to_all") {
          from(peer, rank_ * (count_ / ranks_), count_ / ranks_);
        } else if (op_ == "all_to_allv") {
          const auto sizes = sent(count_, ranks_, peer);
          from(peer, starts(sizes)[rank_], sizes[rank_]);
        } else {
          from(peer, 0, op_ == "all_gatherv" ? gathered_[peer] : count_);
        }
      }
    }
  }

 private:
  std::string_view op_;
  std::size_t count_ = 0;
  std::size_t rank_ = 0;
  std::size_t ranks_ = 1;
  std::vector<std::size_t> gathered_;
  std::vector<std::size_t> scattered_;
  std::vector<std::size_t> exchanged_;
};

}  // namespace r2serve::bench
