// The sources of a job's secret.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/memfd.hpp"
#include "store/tcp/seal.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/store/tcp.hpp"

namespace weft {
namespace {

constexpr const char* kFile = "WEFT_STORE_SECRET_FILE";
constexpr const char* kValue = "WEFT_STORE_SECRET";

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorCode::bad_argument, what); }

std::string read_secret(const std::string& path) {
  const std::string variable = fmt::format("{} is \"{}\"", kFile, path);
  // O_NONBLOCK is needed, because a pipe must not block.
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) throw_errno(variable, errno);
  if (!S_ISREG(status.st_mode)) refuse(fmt::format("{}, which is not a regular file", variable));
  if (status.st_uid != ::geteuid())
    refuse(fmt::format("{}, which is user {}'s; expected a file of user {}", variable, status.st_uid,
                       ::geteuid()));
  if ((status.st_mode & 077) != 0)
    refuse(fmt::format("{}, which others may use (its mode is {:04o}); expected mode 0600", variable,
                       status.st_mode & 07777));
  // one byte more than allowed, to notice files that are too long
  std::string text(kMaxSecretBytes + 2, '\0');
  const ssize_t got = ::read(fd.get(), text.data(), text.size());
  if (got < 0) throw_errno(variable, errno);
  text.resize(static_cast<std::size_t>(got));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

}  // namespace

std::string store_secret_from_env() {
  const auto path = env::get(kFile), value = env::get(kValue);
  if (!path && !value) return {};
  if (path && value) refuse(fmt::format("{} and {} are both set; expected one of them", kFile, kValue));
  std::string secret = path ? read_secret(*path) : *value;
  if (secret.size() < kMinSecretBytes || secret.size() > kMaxSecretBytes)
    refuse(fmt::format("{} has a secret of {} bytes; expected {} to {}, at random (openssl rand -hex 32)",
                       path ? fmt::format("{} \"{}\"", kFile, *path) : std::string(kValue), secret.size(),
                       kMinSecretBytes, kMaxSecretBytes));
  return secret;
}

}  // namespace weft
