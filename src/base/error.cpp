#include "weft/base/error.hpp"

#include <system_error>

namespace weft {

std::string_view name(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::bad_argument: return "bad_argument";
    case ErrorCode::layout: return "layout";
    case ErrorCode::unsupported: return "unsupported";
    case ErrorCode::mismatch: return "mismatch";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::peer_lost: return "peer_lost";
    case ErrorCode::aborted: return "aborted";
    case ErrorCode::system: return "system";
  }
  return "?";
}

Error::Error(ErrorCode code, const std::string& text)
    : Error(Failure{.code = code, .text = text, .ranks = {}}) {}

Error::Error(Failure failure, bool quiesced)
    : std::runtime_error(failure.text),
      details_(std::make_shared<Details>(Details{std::move(failure), quiesced})) {}

void throw_errno(const std::string& what, int error_number) {
  throw Error(ErrorCode::system, what + ": " + std::generic_category().message(error_number));
}

}  // namespace weft
