#include "base/errors/pids_limit.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "base/memfd.hpp"

namespace weft {
namespace {

// The beginning of a file; empty if it cannot be read. It uses no stream, because there may be no memory.
std::string beginning_of(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 4096> bytes;
  const ssize_t got = file.get() < 0 ? -1 : ::read(file.get(), bytes.data(), bytes.size());
  return got > 0 ? std::string(bytes.data(), static_cast<std::size_t>(got)) : std::string();
}

std::optional<long> number_in(const std::string& path) {
  const std::string text = beginning_of(path);
  long number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;  // "max"
  return number;
}

}  // namespace

std::string met_pids_max(std::string_view groups, const std::string& mount) {
  while (!groups.empty()) {
    const std::string_view line = groups.substr(0, groups.find('\n'));
    groups.remove_prefix(std::min(groups.size(), line.size() + 1));
    // "0::/path" of the one tree of version 2, "7:pids:/path" of version 1.
    const std::size_t controllers = line.find(':'), path = line.find(':', controllers + 1);
    if (path == std::string_view::npos) continue;
    const std::string_view which = line.substr(controllers + 1, path - controllers - 1);
    if (!which.empty() && which != "pids") continue;
    std::string folder = mount + (which.empty() ? "" : "/pids");
    const std::size_t top = folder.size();
    folder += line.substr(path + 1);
    for (;;) {
      const std::optional<long> most = number_in(folder + "/pids.max"),
                                now = number_in(folder + "/pids.current");
      if (most && now && *now >= *most) return std::to_string(*most);
      if (folder.size() <= top) break;
      folder.resize(std::max(top, folder.rfind('/')));
    }
  }
  return {};
}

std::string met_pids_max() { return met_pids_max(beginning_of("/proc/self/cgroup"), "/sys/fs/cgroup"); }

}  // namespace weft
