// Open MPI and MPICH as contenders, called from C++. The mpicxx of either library compiles this
// source.
//
//   mpirun -n RANKS ... r2serve-mpi CONTROL_SOCKET
#include <mpi.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

#include "operations.hpp"
#include "worker.hpp"

namespace {

using r2serve::bench::kRoot;
using r2serve::bench::Operation;

std::vector<int> ints(const std::vector<std::size_t>& sizes) {
  return {sizes.begin(), sizes.end()};
}

class Mpi final : public r2serve::bench::Collective {
 public:
  Mpi(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  std::string prepare(const r2serve::bench::Request& request) override {
    if (request.dtype == "float32") return check<float>(MPI_FLOAT, request);
    if (request.dtype == "float64") return check<double>(MPI_DOUBLE, request);
    if (request.dtype == "int32") return check<std::int32_t>(MPI_INT32_T, request);
    if (request.dtype == "int64") return check<std::int64_t>(MPI_INT64_T, request);
    return "MPI has no " + request.dtype;
  }

  void once() override { call_(); }

 private:
  template <typename T>
  std::string check(MPI_Datatype type, const r2serve::bench::Request& request) {
    const std::size_t count = request.bytes / sizeof(T);
    op_ = request.op;
    shape_ = Operation(op_, count, rank_, ranks_);
    if (std::max(shape_.input(), shape_.output()) > std::numeric_limits<int>::max()) {
      return "more elements than an int of MPI counts";
    }
    data_.assign(shape_.input() * sizeof(T), std::byte{0});
    output_.assign(shape_.output() * sizeof(T), std::byte{0});
    if (!bind(type, static_cast<int>(shape_.input()))) return "MPI has no " + op_;
    T* data = reinterpret_cast<T*>(data_.data());
    for (std::size_t i = 0; i < shape_.input(); ++i) {
      data[i] = static_cast<T>(r2serve::bench::pattern(i, rank_));
    }
    once();
    const T* result = reinterpret_cast<const T*>((shape_.in_place() ? data_ : output_).data());
    bool right = true;
    shape_.expected([&](int value) { right = *result++ == static_cast<T>(value) && right; });
    if (!right) throw r2serve::bench::WrongResult("result of " + op_);
    std::fill(data_.begin(), data_.end(), std::byte{0});  // sums of zeros stay finite
    return {};
  }

  // Makes `op_` the current call. Returns false for an unknown op.
  bool bind(MPI_Datatype type, int count) {
    void* data = data_.data();
    void* output = output_.data();
    const MPI_Comm world = MPI_COMM_WORLD;
    const int share = count / ranks_;
    gathered_ = ints(shape_.gathered());
    gathered_at_ = ints(r2serve::bench::starts(shape_.gathered()));
    scattered_ = ints(shape_.scattered());
    exchanged_ = ints(shape_.exchanged());
    exchanged_at_ = ints(r2serve::bench::starts(shape_.exchanged()));
    const std::map<std::string, std::function<void()>> calls = {
        {"all_reduce", [=] { MPI_Allreduce(MPI_IN_PLACE, data, count, type, MPI_SUM, world); }},
        {"all_gather", [=] { MPI_Allgather(data, count, type, output, count, type, world); }},
        {"all_gatherv",
         [=, this] {
           MPI_Allgatherv(data, count, type, output, gathered_.data(), gathered_at_.data(), type,
                          world);
         }},
        {"reduce_scatter",
         [=] { MPI_Reduce_scatter_block(data, output, share, type, MPI_SUM, world); }},
        {"reduce_scatterv",
         [=, this] { MPI_Reduce_scatter(data, output, scattered_.data(), type, MPI_SUM, world); }},
        {"broadcast", [=] { MPI_Bcast(data, count, type, kRoot, world); }},
        {"gather", [=] { MPI_Gather(data, count, type, output, count, type, kRoot, world); }},
        {"all_to_all", [=] { MPI_Alltoall(data, share, type, output, share, type, world); }},
        {"all_to_allv",
         [=, this] {
           const int* sizes = exchanged_.data();
           const int* at = exchanged_at_.data();
           MPI_Alltoallv(data, sizes, at, type, output, sizes, at, type, world);
         }},
        {"send_recv", [=, this] { ring(data, output, count, type); }},
        {"barrier", [=] { MPI_Barrier(world); }},
    };
    const auto found = calls.find(op_);
    if (found == calls.end()) return false;
    call_ = found->second;
    return true;
  }

  // Passes a message of rank 0 from rank to rank, back to rank 0.
  void ring(void* data, void* output, int count, MPI_Datatype type) const {
    const int next = (rank_ + 1) % ranks_;
    const int previous = (rank_ + ranks_ - 1) % ranks_;
    if (rank_ == kRoot) MPI_Send(data, count, type, next, 0, MPI_COMM_WORLD);
    MPI_Recv(output, count, type, previous, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank_ != kRoot) MPI_Send(output, count, type, next, 0, MPI_COMM_WORLD);
  }

  int rank_;
  int ranks_;
  std::string op_;
  Operation shape_;
  std::function<void()> call_;
  std::vector<int> gathered_;
  std::vector<int> gathered_at_;
  std::vector<int> scattered_;
  std::vector<int> exchanged_;
  std::vector<int> exchanged_at_;
  std::vector<std::byte> data_;
  std::vector<std::byte> output_;
};

// Returns this process's rank from the environment variable of Open MPI or MPICH.
int launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    if (const char* rank = std::getenv(name); rank != nullptr) return std::atoi(rank);
  }
  std::fprintf(stderr, "start this program with mpirun\n");
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: mpirun ... %s CONTROL_SOCKET\n", argv[0]);
    return 2;
  }
  // Pinning comes before MPI_Init: threads of the MPI library inherit the affinity of the rank.
  r2serve::bench::pin_rank(launched_rank());
  MPI_Init(&argc, &argv);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  int status = 0;
  {
    Mpi mpi(rank, ranks);
    r2serve::bench::Control control(argv[1], rank);
    status = r2serve::bench::serve(control, mpi, rank);
  }
  MPI_Finalize();
  return status;
}
