#include "weft/base/error.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <system_error>

#include "base/errors/pids_limit.hpp"

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
    case ErrorCode::corrupt: return "corrupt";
  }
  return "?";
}

Error::Error(ErrorCode code, const std::string& text)
    : Error(Failure{.code = code, .text = text, .ranks = {}}) {}

Error::Error(Failure failure, bool quiesced) : Error(std::move(failure), quiesced, {}) {}

Error::Error(Failure failure, bool quiesced, std::vector<LastCall> last_calls)
    : std::runtime_error(failure.text),
      details_(std::make_shared<Details>(Details{std::move(failure), quiesced, std::move(last_calls)})) {}

std::string system_words(int error_number) {
  std::string text = std::generic_category().message(error_number);
  const auto name_limit = [&](int resource, const char* flag, rlim_t unit) {
    rlimit limit{};
    if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 ||
        limit.rlim_cur == RLIM_INFINITY)
      return;
    text += std::string(" (ulimit ") + flag + " is " + std::to_string(limit.rlim_cur / unit) + ")";
  };
  switch (error_number) {
    case EMFILE: name_limit(RLIMIT_NOFILE, "-n", 1); break;
    case ENOMEM:
      name_limit(RLIMIT_AS, "-v", 1024);
      name_limit(RLIMIT_DATA, "-d", 1024);
      break;
    case EFBIG: name_limit(RLIMIT_FSIZE, "-f", 1024); break;
    case EAGAIN:  // for a new thread: there is no room for its stack, or the user has too many threads
      name_limit(RLIMIT_AS, "-v", 1024);
      name_limit(RLIMIT_DATA, "-d", 1024);
      if (const std::string most = met_pids_max(); !most.empty())
        text += " (the cgroup's pids.max is " + most + ")";
      else
        name_limit(RLIMIT_NPROC, "-u", 1);
      break;
    default: break;
  }
  return text;
}

std::string with_limits(std::string words) {
  for (const int error_number : {EMFILE, ENOMEM, EAGAIN, EFBIG}) {
    const std::string plain = std::generic_category().message(error_number);
    if (words.find(plain) == std::string::npos) continue;
    words += system_words(error_number).substr(plain.size());
  }
  return words;
}

void throw_errno(const std::string& what, int error_number) {
  throw Error(ErrorCode::system, what + ": " + system_words(error_number));
}

}  // namespace weft
