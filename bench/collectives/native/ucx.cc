// UCX's failover mode as a contender in the stall measurements: an all-reduce of two ranks over an
// endpoint with UCP_ERR_HANDLING_MODE_FAILOVER. The endpoint has a TCP lane on each rail.
//
// Each rank sends its data as an active message with the number of the call, and adds the received
// data. When a lane fails, the mode of UCX 1.22 replays puts, gets and eager zero-copy active
// messages. Over TCP, UCX has a protocol only for the active messages. Each rank has two inboxes,
// because the other rank may be a call ahead.
//
//   r2serve-ucx CONTROL_SOCKET RANK ADDRESS:PORT
//
// Rank 0 listens at ADDRESS:PORT; the connection only exchanges the UCX worker addresses.
#include <ucp/api/ucp.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "operations.hpp"
#include "sockets.hpp"
#include "worker.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kMessage = 0;
// Longer than a measured fault lasts: a call still waiting after the fault's end never completes.
constexpr std::chrono::seconds kPatience{40};

void check(ucs_status_t status, const char* what) {
  if (status != UCS_OK) {
    throw std::runtime_error(std::string(what) + ": " + ucs_status_string(status));
  }
}

// Ends a wait after `kPatience` with an exception.
class Deadline {
 public:
  void look(const char* what) {
    if (++looks_ % 1024 != 0 || Clock::now() - began_ < kPatience) return;
    throw std::runtime_error(std::string(what) + ": nothing in " +
                             std::to_string(kPatience.count()) + " s");
  }

 private:
  Clock::time_point began_ = Clock::now();
  unsigned looks_ = 0;
};

// The message received for a call.
struct Inbox {
  std::uint64_t call = 0;
  std::vector<float> values;
};

// UCX's objects live as long as the process, because closing an endpoint with a failed lane has no
// known time limit.
class Ucx final : public r2serve::bench::Collective {
 public:
  Ucx(int rank, int bootstrap) : rank_(rank) {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM;
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config), "configuration");
    ucp_context_h context = nullptr;
    const ucs_status_t status = ucp_init(&params, config, &context);
    ucp_config_release(config);
    check(status, "context");
    ucp_worker_params_t of_worker{};
    of_worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    of_worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(ucp_worker_create(context, &of_worker, &worker_), "worker");
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                         UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessage;
    handler.cb = take;
    handler.arg = this;
    check(ucp_worker_set_am_recv_handler(worker_, &handler), "handler of messages");
    connect(bootstrap);
  }

  std::string prepare(const r2serve::bench::Request& request) override {
    if (request.op != "all_reduce") return "the exchange over UCX supports all_reduce only";
    if (request.dtype != "float32") return "the exchange over UCX has no " + request.dtype;
    if (!data_.empty()) return "an exchange over UCX is for one size";
    const std::size_t count = request.bytes / sizeof(float);
    for (Inbox& inbox : inboxes_) inbox.values.assign(count, 0);
    for (std::size_t i = 0; i < count; ++i) {
      data_.push_back(static_cast<float>(r2serve::bench::pattern(i, rank_)));
    }
    once();
    for (std::size_t i = 0; i < count; ++i) {
      if (data_[i] != static_cast<float>(r2serve::bench::pattern_sum(i, 2))) {
        throw r2serve::bench::WrongResult("sum");
      }
    }
    std::fill(data_.begin(), data_.end(), 0.0F);
    return {};
  }

  void once() override {
    header_ = ++call_;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
    const ucs_status_ptr_t request =
        ucp_am_send_nbx(endpoint_, kMessage, &header_, sizeof header_, data_.data(),
                        data_.size() * sizeof(float), &params);
    wait(request);
    const Inbox& inbox = inboxes_[call_ % 2];
    Deadline deadline;
    while (inbox.call != call_) {
      progress();
      deadline.look("the other rank's message");
    }
    for (std::size_t i = 0; i < data_.size(); ++i) data_[i] += inbox.values[i];
  }

  float* first_value() override { return data_.data(); }

  // Returns name, state and bytes sent of each rail's network device. The state is always UP,
  // because UCX does not report the state of a lane.
  std::string rails() override {
    std::string text;
    for (const auto& entry : std::filesystem::directory_iterator("/sys/class/net")) {
      const std::string name = entry.path().filename();
      if (!name.starts_with("rail")) continue;
      std::string bytes;
      std::ifstream(entry.path() / "statistics/tx_bytes") >> bytes;
      text.append(" ").append(name).append(",UP,").append(bytes);
    }
    return text;
  }

 private:
  void connect(int bootstrap) {
    ucp_address_t* address = nullptr;
    std::size_t bytes = 0;
    check(ucp_worker_get_address(worker_, &address, &bytes), "address");
    const std::string own(reinterpret_cast<const char*>(address), bytes);
    ucp_worker_release_address(worker_, address);
    r2serve::bench::send_text(bootstrap, own);
    const std::string theirs = r2serve::bench::receive_text(bootstrap);
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(theirs.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_FAILOVER;
    params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t status) {
      static_cast<Ucx*>(self)->failed_ = status;
    };
    params.err_handler.arg = this;
    check(ucp_ep_create(worker_, &params, &endpoint_), "endpoint");
  }

  static ucs_status_t take(void* self, const void* header, std::size_t header_bytes, void* data,
                           std::size_t bytes, const ucp_am_recv_param_t* how) {
    return static_cast<Ucx*>(self)->took(header, header_bytes, data, bytes, how);
  }

  // Takes a message into an inbox. A replayed message may arrive twice or late: messages of
  // earlier calls and duplicates are dropped.
  ucs_status_t took(const void* header, std::size_t header_bytes, const void* data,
                    std::size_t bytes, const ucp_am_recv_param_t* how) {
    std::uint64_t call = 0;
    if (header_bytes != sizeof call || (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
      failed_ = UCS_ERR_UNSUPPORTED;
      return UCS_OK;
    }
    std::memcpy(&call, header, sizeof call);
    Inbox& inbox = inboxes_[call % 2];
    if (call <= inbox.call) return UCS_OK;
    if (bytes != inbox.values.size() * sizeof(float)) {
      failed_ = UCS_ERR_MESSAGE_TRUNCATED;
      return UCS_OK;
    }
    std::memcpy(inbox.values.data(), data, bytes);
    inbox.call = call;
    return UCS_OK;
  }

  void progress() {
    ucp_worker_progress(worker_);
    check(failed_, "the endpoint failed");
  }

  void wait(ucs_status_ptr_t request) {
    if (request == nullptr) return;
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "sending");
    Deadline deadline;
    ucs_status_t status = UCS_INPROGRESS;
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
      progress();
      deadline.look("sending");
    }
    ucp_request_free(request);
    check(status, "sending");
  }

  int rank_;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  ucs_status_t failed_ = UCS_OK;
  std::vector<float> data_;
  std::array<Inbox, 2> inboxes_;
  std::uint64_t call_ = 0;
  std::uint64_t header_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s CONTROL_SOCKET RANK ADDRESS:PORT\n", argv[0]);
    return 2;
  }
  const int rank = std::atoi(argv[2]);
  r2serve::bench::pin_rank(rank);
  const sockaddr_in address = r2serve::bench::parse_address(argv[3]);
  const int bootstrap =
      rank == 0 ? r2serve::bench::accept_one(address) : r2serve::bench::connect_to(address, false);
  try {
    Ucx ucx(rank, bootstrap);
    r2serve::bench::Control control(argv[1], rank);
    return r2serve::bench::serve(control, ucx, rank);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "UCX: %s\n", error.what());
    return 1;
  }
}
