// Typed errors.  r2serve/errors.py has a Python exception class for each code except `ok`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>

namespace r2ccl {

enum class ErrorCode : std::uint8_t {
  ok,
  invalid_argument,  // a parameter or option is wrong; nothing was sent
  order_mismatch,    // ranks called different collectives under the same number
  peer_lost,         // no rail to a peer for link_timeout, or the peer is gone
  peer_closed,       // the peer closed the communicator gracefully
  aborted,           // a rank aborted the communicator; the message has the reason
  timeout,           // start-up did not finish in time
  internal,          // a broken invariant (a bug of r2ccl), or the system refused a resource
};

// Outcome of an operation without a value: ok, or an error code and its text.  Not copyable.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message)
      : detail_(std::make_unique<Detail>(Detail{code, std::move(message)})) {}

  [[nodiscard]] bool ok() const { return detail_ == nullptr; }
  [[nodiscard]] ErrorCode code() const { return detail_ ? detail_->code : ErrorCode::ok; }
  [[nodiscard]] const std::string& message() const {
    static const std::string none;
    if (detail_ == nullptr) return none;
    return detail_->message;
  }

 private:
  struct Detail {
    ErrorCode code;
    std::string message;
  };
  std::unique_ptr<Detail> detail_;
};

// Value of an operation, or the error that prevented the value.  value() requires ok();
// take_status() moves the error out, so call take_status() once.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : value_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool ok() const { return std::holds_alternative<T>(value_); }
  [[nodiscard]] T& value() { return std::get<T>(value_); }
  [[nodiscard]] Status take_status() {
    return ok() ? Status() : std::move(std::get<Status>(value_));
  }

 private:
  std::variant<T, Status> value_;
};

// Evaluates an expression of type Status.  On an error, the enclosing function returns the Status.
#define R2CCL_TRY(expression)                                                  \
  do {                                                                         \
    if (::r2ccl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

}  // namespace r2ccl
