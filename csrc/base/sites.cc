#include "base/sites.hpp"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace r2ccl {
namespace {

constexpr std::size_t most_sites = 4096;

std::mutex mutex;
std::unordered_map<std::uint32_t, std::string> texts;
thread_local std::uint32_t next_site = 0;

}  // namespace

void set_next_site(std::uint32_t site) { next_site = site; }

std::uint32_t take_site() { return std::exchange(next_site, 0); }

void note_site(std::uint32_t site, const std::string& text) {
  const std::lock_guard guard(mutex);
  if (texts.size() < most_sites) texts.try_emplace(site, text);
}

std::string site_text(std::uint32_t site) {
  const std::lock_guard guard(mutex);
  const auto found = texts.find(site);
  return found != texts.end() ? found->second : "site " + std::to_string(site);
}

}  // namespace r2ccl
