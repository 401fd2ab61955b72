// How much processor time the control groups (cgroups) of a process allow it: the quotas of containers and
// batch systems.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

/// A cgroup that limits all its processes together.
struct CpuQuota {
  std::uint64_t id = 0;         ///< of the cgroup, on this host
  std::int64_t millicores = 0;  ///< thousandths of a core
  friend bool operator==(const CpuQuota&, const CpuQuota&) = default;
};

/// The cgroups with a quota that this process is in, from the outermost to its own; version 2 (cpu.max) and
/// version 1 (cpu.cfs_quota_us). Empty if no cgroup has a quota, or if the system does not report it. `root`
/// is put before every path, for tests.
std::vector<CpuQuota> cpu_quotas(const std::string& root = "");

/// Like cpu_quotas(), but up to a second old: otherwise half a dozen files would be read for every group.
/// Thread-safe.
std::vector<CpuQuota> recent_cpu_quotas();

/// The number of cores that several processes have together; each process is in the cgroups of its list. A
/// cgroup gives all its processes together no more than its quota. 0: some of the processes are not limited.
std::int64_t shared_millicores(const std::vector<std::vector<CpuQuota>>& processes);

/// Quotas as text without blanks: "17:2000,23:500"; "-" if there are none. decode_quotas() returns none for
/// any other text.
std::string encode(const std::vector<CpuQuota>& quotas);
std::vector<CpuQuota> decode_quotas(const std::string& text);

}  // namespace weft
