#include "netplugin/options.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>
#include <variant>

#include "base/file_descriptor.hpp"

namespace r2ccl::net {
namespace {

struct Range {
  double low;
  double high;
  bool power_of_two = false;
};

struct Entry {
  const char* variable;
  std::variant<bool Config::*, std::int64_t Config::*, double Config::*, std::string Config::*>
      field;
  Range range = {0, 0};
};

// Names and ranges of r2serve/config.py; tests/unit/test_netplugin_options.py compares both.
constexpr Entry entries[] = {
    {"R2CCL_PORTS", &Config::ports},
    {"R2CCL_RESILIENCE", &Config::resilience},
    {"R2CCL_FALLBACK", &Config::fallback},
    {"R2CCL_CHECKSUM", &Config::checksum},
    {"R2CCL_LINK_TIMEOUT_S", &Config::link_timeout_s, {0.1, 3600}},
    {"R2CCL_REFUSED_GRACE_S", &Config::refused_grace_s, {0.05, 60}},
    {"R2CCL_CONNECT_TIMEOUT_S", &Config::connect_timeout_s, {0.1, 3600}},
    {"R2CCL_HANDSHAKE_TIMEOUT_MS", &Config::handshake_timeout_ms, {10, 60'000}},
    {"R2CCL_SMALL_MESSAGE_BYTES", &Config::small_message_bytes, {0, 67'108'864}},
    {"R2CCL_CHUNK_BYTES", &Config::chunk_bytes, {4096, 67'108'864, true}},
    {"R2CCL_SLOT_BYTES", &Config::slot_bytes, {4096, 1'073'741'824}},
    {"R2CCL_SLOTS", &Config::slots, {2, 256, true}},
    {"R2CCL_SPARE_SLOTS", &Config::spare_slots, {0, 256}},
    {"R2CCL_STAGING_BYTES", &Config::staging_bytes, {0, 1'073'741'824}},
    {"R2CCL_SOCKET_BUFFER_BYTES", &Config::socket_buffer_bytes, {0, 1'073'741'824}},
    {"R2CCL_ACK_DEADLINE_FLOOR_MS", &Config::ack_deadline_floor_ms, {1, 60'000}},
    {"R2CCL_ACK_DEADLINE_FACTOR", &Config::ack_deadline_factor, {1, 1000}},
    {"R2CCL_DEAD_DEADLINE_MS", &Config::dead_deadline_ms, {1, 60'000}},
    {"R2CCL_PROBE_INTERVAL_MS", &Config::probe_interval_ms, {1, 60'000}},
    {"R2CCL_REJOIN_BACKOFF_MIN_MS", &Config::rejoin_backoff_min_ms, {0, 600'000}},
    {"R2CCL_REJOIN_BACKOFF_MAX_MS", &Config::rejoin_backoff_max_ms, {0, 600'000}},
    {"R2CCL_FLAP_HALF_LIFE_S", &Config::flap_half_life_s, {0, 3600}},
    {"R2CCL_SPIN_US", &Config::spin_us, {0, 10'000'000}},
    {"R2CCL_BACKGROUND_INTERVAL_MS", &Config::background_interval_ms, {1, 1000}},
    {"R2CCL_BACKGROUND_CPUS", &Config::background_cpus},
    {"R2CCL_JOURNAL_DIR", &Config::journal_dir},
    {"R2CCL_FAULT_FILE", &Config::fault_file},
};

std::string_view stripped(std::string_view text) {
  constexpr std::string_view space = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(space);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(space) - begin + 1);
}

std::string number(double value) {  // "0.05", "60"
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string allowed(const Range& range, bool integer) {
  const char* noun = range.power_of_two ? "a power of two" : integer ? "an integer" : "a number";
  return std::string(noun) + " from " + number(range.low) + " to " + number(range.high);
}

// Each returns false for a text that is no value of the option.
bool parse(std::string_view text, const Range&, bool& value) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto is = [&lower](std::array<std::string_view, 4> words) {
    return std::ranges::find(words, lower) != words.end();
  };
  value = is({"on", "1", "true", "yes"});
  return value || is({"off", "0", "false", "no"});
}

template <typename Number>
bool parse(std::string_view text, const Range& range, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return false;
  const auto as_double = static_cast<double>(value);
  if (!(as_double >= range.low && as_double <= range.high)) return false;  // refuses NaN, too
  return !range.power_of_two || std::has_single_bit(static_cast<std::uint64_t>(value));
}

bool parse(std::string_view text, const Range&, std::string& value) {
  value = text;
  return true;
}

// Keeps the default if the variable is not set.
template <typename Value>
Status set(const char* variable, const Range& range, Value& value) {
  const char* const given = std::getenv(variable);
  if (given == nullptr) return {};
  const std::string_view text = stripped(given);
  if (parse(text, range, value)) return {};
  const std::string right = std::is_same_v<Value, bool>
                                ? "on or off"
                                : allowed(range, std::is_same_v<Value, std::int64_t>);
  return {ErrorCode::invalid_argument,
          std::string(variable) + " is '" + std::string(text) + "': must be " + right};
}

Status set(const Entry& entry, Config& config) {
  return std::visit([&](auto field) { return set(entry.variable, entry.range, config.*field); },
                    entry.field);
}

Status check_at_most(const char* variable, std::int64_t value, const char* limit, std::int64_t of) {
  if (value <= of) return {};
  return {ErrorCode::invalid_argument, std::string(variable) + " is " + std::to_string(value) +
                                           ": must be at most " + limit + " (" +
                                           std::to_string(of) + ")"};
}

Status check_across(const Config& config) {
  R2CCL_TRY(check_at_most("R2CCL_SMALL_MESSAGE_BYTES", config.small_message_bytes,
                          "R2CCL_CHUNK_BYTES", config.chunk_bytes));
  R2CCL_TRY(check_at_most("R2CCL_ACK_DEADLINE_FLOOR_MS", config.ack_deadline_floor_ms,
                          "R2CCL_DEAD_DEADLINE_MS", config.dead_deadline_ms));
  R2CCL_TRY(check_at_most("R2CCL_REJOIN_BACKOFF_MIN_MS", config.rejoin_backoff_min_ms,
                          "R2CCL_REJOIN_BACKOFF_MAX_MS", config.rejoin_backoff_max_ms));
  constexpr std::int64_t most_chunks = 64;  // in a slot
  const std::int64_t chunks = config.slot_bytes / config.chunk_bytes;
  if (config.slot_bytes % config.chunk_bytes == 0 && chunks <= most_chunks) return {};
  return {ErrorCode::invalid_argument,
          "R2CCL_SLOT_BYTES is " + std::to_string(config.slot_bytes) +
              ": must be a multiple of R2CCL_CHUNK_BYTES, and at most 64 chunks"};
}

Status wrong_secret(const std::string& path, const std::string& why) {
  return {ErrorCode::invalid_argument, "R2CCL_SECRET_FILE is '" + path + "': " + why};
}

// Reads the pre-shared key, without the blanks at both ends.
Status read_key(const std::string& path, std::vector<std::byte>& key) {
  if (path.empty()) return {};
  constexpr std::size_t shortest = 32;
  constexpr std::size_t longest = 4096;
  const FileDescriptor file =
      FileDescriptor::made_by([&path] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  struct stat about {};
  if (!file.valid() || ::fstat(file.get(), &about) != 0)
    return wrong_secret(path, std::strerror(errno));
  if ((about.st_mode & 077U) != 0)
    return wrong_secret(path, "open to other users; must be a file for its owner only (mode 600)");
  std::array<char, longest + 1> text{};
  std::size_t size = 0;
  for (;;) {
    const ssize_t got = ::read(file.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return wrong_secret(path, std::strerror(errno));
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  const std::string_view content = stripped({text.data(), size});
  if (content.size() < shortest || content.size() > longest)
    return wrong_secret(
        path, "has " + std::to_string(content.size()) + " bytes; must be from 32 to 4096 bytes");
  const auto bytes = std::as_bytes(std::span(content));
  key.assign(bytes.begin(), bytes.end());
  return {};
}

}  // namespace

Result<Options> options_from_environment() {
  Options options;
  for (const Entry& entry : entries) R2CCL_TRY(set(entry, options.core));
  R2CCL_TRY(check_across(options.core));
  constexpr Range any = {0, 0};
  R2CCL_TRY(set("R2CCL_RAILS", any, options.rails));
  R2CCL_TRY(set("R2CCL_NODE", any, options.node));
  R2CCL_TRY(set("R2CCL_MANAGEMENT", any, options.management));
  R2CCL_TRY(set("R2CCL_NCCL_EXIT_S", {0, 3600}, options.exit_s));
  std::string secret_file;
  R2CCL_TRY(set("R2CCL_SECRET_FILE", any, secret_file));
  R2CCL_TRY(read_key(secret_file, options.key));
  return options;
}

}  // namespace r2ccl::net
