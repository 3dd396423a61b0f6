// Texts with a limit in bytes.
#pragma once

#include <cstddef>
#include <string>

namespace r2ccl {

// Cuts a UTF-8 text to at most `most` bytes, before a character that does not fit.
inline void cut(std::string& text, std::size_t most) {
  if (text.size() <= most) return;
  const auto continues = [&text](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U;
  };
  while (most > 0 && continues(most)) --most;
  text.resize(most);
}

}  // namespace r2ccl
