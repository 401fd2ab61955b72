// The processor time that the control groups (cgroups) of a process allow it: the quotas of containers and
// batch systems.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

/// A cgroup that limits all its processes together.
struct CpuQuota {
  std::uint64_t id = 0;         ///< identifies the cgroup on this host
  std::int64_t millicores = 0;  ///< thousandths of a core
  friend bool operator==(const CpuQuota&, const CpuQuota&) = default;
};

/// The cgroups with a quota to which this process belongs, from the outermost to its own. Version 2 (cpu.max)
/// and version 1 (cpu.cfs_quota_us) are read. Empty if no cgroup has a quota, or if the system does not
/// report it. `root` is put before every path, for tests.
std::vector<CpuQuota> cpu_quotas(const std::string& root = "");

/// Like cpu_quotas(), but the result may be a second old, so that not every new group reads half a dozen
/// files. Thread-safe.
std::vector<CpuQuota> recent_cpu_quotas();

/// Returns how many thousandths of a core several processes have together. processes[i] lists the cgroups of
/// process i. A cgroup allows all its processes together at most its quota. Returns 0 if one of the processes
/// is not limited.
std::int64_t shared_millicores(const std::vector<std::vector<CpuQuota>>& processes);

/// Converts quotas to a text without blanks: "17:2000,23:500". "-" if there are none. decode_quotas() returns
/// none for any other text.
std::string encode(const std::vector<CpuQuota>& quotas);
std::vector<CpuQuota> decode_quotas(const std::string& text);

}  // namespace weft
