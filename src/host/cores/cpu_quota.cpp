#include "host/cores/cpu_quota.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/clock.hpp"

namespace weft {
namespace {

constexpr std::int64_t kMostMillicores = 1'000'000'000;  // a million cores
constexpr std::size_t kMostDepth = 64;                   // nesting of cgroups

// The place at which a hierarchy of cgroups is mounted, and the cgroup of the hierarchy that the mount shows.
struct Mount {
  std::string at, shows;
};

// A mount point with a blank in its name is written with "\040" there.
std::string unescaped(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      plain += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

bool lists(const std::string& commas, const std::string& word) {
  return ("," + commas + ",").find("," + word + ",") != std::string::npos;
}

// The folder at which the cgroup file system is mounted. A line of /proc/self/mountinfo has these fields
// (proc(5)): id, parent, device, root, mount point, options, optional fields, "-", type, source, options of
// the type.
std::optional<Mount> find_mount(const std::string& root, bool version2) {
  FileIn file(root + "/proc/self/mountinfo");
  std::optional<Mount> found;
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    TextIn before(line), after(line.substr(dash + 3));
    std::string id, parent, device, shows, at, type, source, options;
    if (!(before >> id >> parent >> device >> shows >> at) || !(after >> type >> source >> options)) continue;
    if (version2 ? type == "cgroup2" : type == "cgroup" && lists(options, "cpu"))
      found = Mount{unescaped(at), unescaped(shows)};  // the last mount hides earlier ones
  }
  return found;
}

// Converts quota and period in microseconds to thousandths of a core. A quota of "max" or -1 means no quota.
std::optional<std::int64_t> millicores(const std::string& quota, const std::string& period) {
  const auto q = parse_integer<std::int64_t>(quota), p = parse_integer<std::int64_t>(period);
  if (!q || !p || *q <= 0 || *p <= 0) return std::nullopt;
  const double thousandths = static_cast<double>(*q) / static_cast<double>(*p) * 1000;
  return static_cast<std::int64_t>(std::clamp(thousandths, 1.0, static_cast<double>(kMostMillicores)));
}

std::optional<std::int64_t> quota_in(const std::string& folder, bool version2) {
  std::string quota, period;
  if (version2) {
    FileIn(folder + "/cpu.max") >> quota >> period;
  } else {
    FileIn(folder + "/cpu.cfs_quota_us") >> quota;
    FileIn(folder + "/cpu.cfs_period_us") >> period;
  }
  return millicores(quota, period);
}

// Adds the quotas of the cgroups from the mount point down to `cgroup`, which is relative to the root of the
// hierarchy, as /proc/self/cgroup gives it.
void add_quotas(const std::string& root, std::string cgroup, bool version2, std::vector<CpuQuota>& found) {
  const std::optional<Mount> mount = find_mount(root, version2);
  if (!mount) return;
  if (mount->shows != "/") {  // a container that sees its own part only
    if (cgroup == mount->shows || cgroup.starts_with(mount->shows + "/")) {
      cgroup.erase(0, mount->shows.size());
    } else {
      cgroup.clear();
    }
  }
  if (cgroup.find("..") != std::string::npos) cgroup.clear();  // outside of the mounted part
  for (std::size_t end = 0; end != std::string::npos;) {
    const std::string folder = root + mount->at + cgroup.substr(0, end);
    struct stat info {};
    const auto quota = quota_in(folder, version2);
    if (quota && ::stat(folder.c_str(), &info) == 0)
      found.push_back(
          {static_cast<std::uint64_t>(info.st_ino) ^ static_cast<std::uint64_t>(info.st_dev) << 48, *quota});
    if (end >= cgroup.size() || cgroup == "/") break;
    end = std::min(cgroup.find('/', end + 1), cgroup.size());
  }
}

}  // namespace

std::vector<CpuQuota> cpu_quotas(const std::string& root) {
  std::vector<CpuQuota> found;
  FileIn file(root + "/proc/self/cgroup");
  // "0::/path" in version 2, "4:cpu,cpuacct:/path" in version 1
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      path = line.substr(second + 1);
    if (controllers.empty() || lists(controllers, "cpu")) add_quotas(root, path, controllers.empty(), found);
  }
  return found;
}

std::vector<CpuQuota> recent_cpu_quotas() {
  constexpr auto kRecent = std::chrono::seconds(1);
  static std::mutex mutex;
  static std::optional<Clock::time_point> read;
  static pid_t reader = 0;
  static std::vector<CpuQuota> quotas;
  // In a child that was forked while another thread held the lock, the lock is never released.
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) return cpu_quotas();
  const auto now = Clock::now();
  if (!read || now - *read >= kRecent || reader != ::getpid()) {
    quotas = cpu_quotas();
    read = now;
    reader = ::getpid();
  }
  return quotas;
}

std::int64_t shared_millicores(const std::vector<std::vector<CpuQuota>>& processes) {
  // The entry of each cgroup has its quota and its direct members, which are other cgroups or processes. 0 is
  // the root of all cgroups.
  struct Node {
    std::int64_t quota = 0;
    bool process = false;
    std::set<std::uint64_t> inside;
    // each node counts only once, even if the lists of other ranks contradict each other
    bool counted = false;
  };
  std::map<std::uint64_t, Node> nodes;
  for (const auto& list : processes) {
    std::uint64_t outer = 0;
    for (const CpuQuota& q : list) {
      nodes[outer].inside.insert(q.id);
      nodes[outer = q.id].quota = q.millicores;
    }
    nodes[outer].process = true;
  }
  // Returns the time that a cgroup allows: the sum over its members, but at most its quota. 0: no limit.
  const auto given = [&](const auto& self, std::uint64_t id) -> std::int64_t {
    Node& node = nodes[id];
    if (node.process || std::exchange(node.counted, true)) return node.quota;
    std::int64_t sum = 0;
    for (const std::uint64_t inner : node.inside) {
      const std::int64_t part = self(self, inner);
      if (part == 0) return node.quota;
      sum += part;
    }
    return node.quota == 0 ? sum : std::min(sum, node.quota);
  };
  return given(given, 0);
}

std::string encode(const std::vector<CpuQuota>& quotas) {
  std::string text;
  for (const CpuQuota& q : quotas)
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", q.id, q.millicores);
  return text.empty() ? "-" : text;
}

std::vector<CpuQuota> decode_quotas(const std::string& text) {
  std::vector<CpuQuota> quotas;
  TextIn items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const std::size_t colon = std::min(item.find(':'), item.size());
    const auto id = parse_integer<std::uint64_t>(item.substr(0, colon));
    const auto value = parse_integer<std::int64_t>(item.substr(std::min(colon + 1, item.size())));
    if (!id || !value || *value < 1 || *value > kMostMillicores || quotas.size() == kMostDepth) return {};
    quotas.push_back({*id, *value});
  }
  return quotas;
}

}  // namespace weft
