#include "base/sites.hpp"

#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/limits.hpp"

namespace r2ccl {
namespace {

std::mutex mutex;
// A full table becomes the older table, whose sites are forgotten unless they are noted again.
std::unordered_map<std::uint32_t, std::string> texts;
std::unordered_map<std::uint32_t, std::string> older;
thread_local std::uint32_t next_site = 0;

}  // namespace

void set_next_site(std::uint32_t site) { next_site = site; }

std::uint32_t take_site() { return std::exchange(next_site, 0); }

void note_site(std::uint32_t site, const std::string& text) {
  const std::lock_guard guard(mutex);
  if (texts.size() >= most_site_texts) older = std::exchange(texts, {});
  texts.try_emplace(site, text);
}

std::string site_text(std::uint32_t site) {
  const std::lock_guard guard(mutex);
  for (const auto* table : {&texts, &older})
    if (const auto found = table->find(site); found != table->end()) return found->second;
  return "site " + std::to_string(site);
}

}  // namespace r2ccl
