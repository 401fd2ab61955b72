#include "backends/exchange/head.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/shared_words.hpp"

namespace weft {

void ExchangeHead::write(const ExchangeProgram::Side& side, std::byte* to) noexcept {
  ExchangeHead head;
  head.form = side.form;
  side.about.copy(head.about, sizeof(about) - 1);
  std::memcpy(to, &head, sizeof(head));
}

std::string words_of_part(const std::byte* data, DType dtype, std::int64_t count) {
  ExchangeHead head;
  if (data != nullptr && dtype == DType::u8 && count >= static_cast<std::int64_t>(sizeof(head))) {
    std::memcpy(&head, data, sizeof(head));
    if (head.mark == ExchangeHead::kMark) return text_in(head.about);
  }
  return fmt::format("a message of {} x{}", name(dtype), count);
}

std::string exchange_difference(int peer, std::string_view theirs, int rank, std::string_view own) {
  return fmt::format("rank {} gave {}, and rank {} {}; expected the same on all ranks", peer, theirs, rank,
                     own);
}

}  // namespace weft
