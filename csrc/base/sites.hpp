// Call sites: the places of the user's program that make collective calls, known by a hash.
#pragma once

#include <cstdint>
#include <string>

namespace r2ccl {

// Sets the site of this thread's next call that all ranks make together.  take_site() returns the
// site and clears it.
void set_next_site(std::uint32_t site);
[[nodiscard]] std::uint32_t take_site();

// Stores the text of a site, for errors.  The most recent 8192 sites are kept.
void note_site(std::uint32_t site, const std::string& text);
// Returns the text of a site; for an unknown site its number.
[[nodiscard]] std::string site_text(std::uint32_t site);

}  // namespace r2ccl
