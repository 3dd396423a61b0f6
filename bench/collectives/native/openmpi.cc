// Open MPI as a peer of the benchmark, called as a native program would call it.
//
//   mpirun -n RANKS ... r2serve-openmpi CONTROL_SOCKET
#include <mpi.h>

#include <algorithm>

#include "worker.hpp"

namespace {

class OpenMpi final : public r2serve::bench::Collective {
 public:
  OpenMpi(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  std::string prepare(const r2serve::bench::Request& request) override {
    op_ = request.op;
    if (request.dtype == "float32") return check<float>(MPI_FLOAT, request.bytes);
    if (request.dtype == "float64") return check<double>(MPI_DOUBLE, request.bytes);
    if (request.dtype == "int32") return check<std::int32_t>(MPI_INT32_T, request.bytes);
    if (request.dtype == "int64") return check<std::int64_t>(MPI_INT64_T, request.bytes);
    return "Open MPI has no " + request.dtype;
  }

  void once() override {
    const int count = static_cast<int>(count_);
    if (op_ == "all_reduce") {
      MPI_Allreduce(MPI_IN_PLACE, data_.data(), count, type_, MPI_SUM, MPI_COMM_WORLD);
    } else if (op_ == "all_gather") {
      MPI_Allgather(data_.data(), count, type_, output_.data(), count, type_, MPI_COMM_WORLD);
    } else if (op_ == "reduce_scatter") {
      MPI_Reduce_scatter_block(data_.data(), output_.data(), count / ranks_, type_, MPI_SUM,
                               MPI_COMM_WORLD);
    } else {
      MPI_Bcast(data_.data(), count, type_, 0, MPI_COMM_WORLD);
    }
  }

 private:
  template <typename T>
  std::string check(MPI_Datatype type, std::size_t bytes) {
    type_ = type;
    count_ = bytes / sizeof(T);
    const auto ranks = static_cast<std::size_t>(ranks_);
    data_.assign(bytes, std::byte{0});
    output_.assign(op_ == "all_gather" ? bytes * ranks : bytes / ranks, std::byte{0});
    T* data = reinterpret_cast<T*>(data_.data());
    for (std::size_t i = 0; i < count_; ++i) {
      data[i] = static_cast<T>(r2serve::bench::pattern(i, rank_));
    }
    once();
    if (!correct<T>()) return "wrong result";
    std::fill(data_.begin(), data_.end(), std::byte{0});  // sums stay finite however long it runs
    return {};
  }

  template <typename T>
  bool correct() const {
    using r2serve::bench::pattern;
    using r2serve::bench::pattern_sum;
    const T* data = reinterpret_cast<const T*>(data_.data());
    const T* output = reinterpret_cast<const T*>(output_.data());
    const std::size_t share = count_ / static_cast<std::size_t>(ranks_);
    const std::size_t first = share * static_cast<std::size_t>(rank_);
    for (std::size_t i = 0; i < count_; ++i) {
      if (op_ == "all_reduce" && data[i] != static_cast<T>(pattern_sum(i, ranks_))) return false;
      if (op_ == "broadcast" && data[i] != static_cast<T>(pattern(i, 0))) return false;
      for (int r = 0; op_ == "all_gather" && r < ranks_; ++r) {
        const T value = output[static_cast<std::size_t>(r) * count_ + i];
        if (value != static_cast<T>(pattern(i, r))) return false;
      }
    }
    for (std::size_t i = 0; op_ == "reduce_scatter" && i < share; ++i) {
      if (output[i] != static_cast<T>(pattern_sum(first + i, ranks_))) return false;
    }
    return true;
  }

  int rank_;
  int ranks_;
  std::string op_;
  MPI_Datatype type_ = MPI_FLOAT;
  std::size_t count_ = 0;
  std::vector<std::byte> data_;
  std::vector<std::byte> output_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: mpirun ... %s CONTROL_SOCKET\n", argv[0]);
    return 2;
  }
  // Before MPI_Init, so that the library's own threads are pinned with the rank as in every peer.
  const char* launched_as = std::getenv("OMPI_COMM_WORLD_RANK");
  if (launched_as == nullptr) {
    std::fprintf(stderr, "start this program with mpirun\n");
    return 2;
  }
  r2serve::bench::pin_rank(std::atoi(launched_as));
  MPI_Init(&argc, &argv);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  int status = 0;
  {
    OpenMpi mpi(rank, ranks);
    r2serve::bench::Control control(argv[1], rank);
    status = r2serve::bench::serve(control, mpi);
  }
  MPI_Finalize();
  return status;
}
