// Typed errors.  One code per Python exception class (r2serve/errors.py maps them 1:1).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>

namespace r2ccl {

enum class ErrorCode : std::uint8_t {
  ok,
  invalid_argument,  // a parameter of this call is wrong; nothing was sent
  order_mismatch,    // ranks called different collectives under the same number
  peer_lost,         // no rail to a peer for longer than link_timeout, or the peer is gone
  peer_closed,       // the peer closed the communicator in good order
  aborted,           // another rank reported a fatal verdict (its text is in the message)
  timeout,           // start-up did not finish in time
  internal,          // a broken invariant: a bug of r2ccl
};

// Cheap when ok (one null pointer), carries code and text otherwise.
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

#define R2CCL_TRY(expression)                                                  \
  do {                                                                         \
    if (::r2ccl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

}  // namespace r2ccl
