// The cores on which this thread may run, and the time on these cores that the cgroups of its process allow.
// It also has both for all ranks of a group together. If a host has more ranks than usable cores, its ranks
// do not spin. Also the number of memory nodes of the machine.
#pragma once

#include <sched.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "host/cores/cpu_quota.hpp"

namespace weft {

/// A set of cores. Ranks send each other their cores, because each rank may be bound to different cores.
class CoreSet {
 public:
  /// The cores that this thread may use. Beyond 1024 cores the kernel reports nothing, and such a machine
  /// counts as having one core.
  static CoreSet usable() noexcept {
    CoreSet cores;
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_SET(0, &set);
    for (int core = 0; core < CPU_SETSIZE; ++core)
      cores.bits_[static_cast<std::size_t>(core)] = CPU_ISSET(core, &set);
    return cores;
  }
  /// Converts the set to a text: each hexadecimal digit stands for four cores, the lowest cores first.
  std::string encode() const {
    std::string text;
    for (std::size_t i = 0; i < bits_.size(); i += 4)
      text += "0123456789abcdef"[bits_[i] + 2 * bits_[i + 1] + 4 * bits_[i + 2] + 8 * bits_[i + 3]];
    text.erase(text.find_last_not_of('0') + 1);
    return text.empty() ? "0" : text;
  }
  /// Converts the text back. It ignores other characters.
  static CoreSet decode(const std::string& text) noexcept {
    CoreSet cores;
    for (std::size_t i = 0; i < std::min(text.size(), cores.bits_.size() / 4); ++i) {
      const std::size_t digit = std::string("0123456789abcdef").find(text[i]);
      for (std::size_t bit = 0; bit < 4 && digit < 16; ++bit)
        cores.bits_[4 * i + bit] = (digit >> bit & 1) != 0;
    }
    return cores;
  }
  CoreSet& operator|=(const CoreSet& others) noexcept {
    bits_ |= others.bits_;
    return *this;
  }
  int count() const noexcept { return static_cast<int>(bits_.count()); }

 private:
  std::bitset<CPU_SETSIZE> bits_;
};

/// The part of one host's processors that processes may use: cores, and the time on these cores that the
/// quotas of their cgroups allow.
class CpuShare {
 public:
  static CpuShare usable() {
    CpuShare share;
    share.cores_ = CoreSet::usable();
    static const std::uint64_t host = [] {
      std::string boot;
      FileIn("/proc/sys/kernel/random/boot_id") >> boot;
      return std::hash<std::string>()(boot);
    }();
    share.host_ = host;
    share.quotas_.push_back(recent_cpu_quotas());
    return share;
  }
  /// Converts the share to a text without blanks.
  std::string encode() const {
    std::string text = cores_.encode();
    text.append("/").append(std::to_string(host_));
    for (const auto& list : quotas_) text.append("/").append(weft::encode(list));
    return text;
  }
  /// Converts the text back. It ignores other parts of it.
  static CpuShare decode(const std::string& text) {
    CpuShare share;
    TextIn parts(text);
    std::string part;
    if (std::getline(parts, part, '/')) share.cores_ = CoreSet::decode(part);
    if (std::getline(parts, part, '/')) share.host_ = parse_integer<std::uint64_t>(part).value_or(0);
    while (std::getline(parts, part, '/')) share.quotas_.push_back(decode_quotas(part));
    return share;
  }
  /// Adds another rank's share. A rank of another host adds its cores, since all hosts are bound in the same
  /// way, but no quotas.
  CpuShare& operator|=(const CpuShare& others) {
    cores_ |= others.cores_;
    if (others.host_ == host_) quotas_.insert(quotas_.end(), others.quotas_.begin(), others.quotas_.end());
    return *this;
  }
  /// The number of whole cores, at least one.
  int count() const {
    const std::int64_t quota = shared_millicores(quotas_);
    const int cores = std::max(1, cores_.count());
    return quota == 0 ? cores : static_cast<int>(std::clamp<std::int64_t>(quota / 1000, 1, cores));
  }

 private:
  CoreSet cores_;
  std::uint64_t host_ = 0;
  std::vector<std::vector<CpuQuota>> quotas_;  // of each process
};

inline int usable_cores() { return CpuShare::usable().count(); }

/// Counts the numbers in a list as the kernel writes it, "0-3,8". A text that is no list of cores adds
/// nothing.
inline int count_listed(const std::string& list) {
  TextIn parts(list);
  int count = 0;
  for (std::string part; std::getline(parts, part, ',');) {
    const std::size_t dash = part.find('-');
    const auto first = parse_integer<std::uint16_t>(part.substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse_integer<std::uint16_t>(part.substr(dash + 1));
    if (first && last && *first <= *last) count += *last - *first + 1;
  }
  return count;
}

/// Returns 1 if the kernel does not report the number.
inline int memory_nodes() {
  std::string list;
  FileIn("/sys/devices/system/node/online") >> list;
  return std::max(1, count_listed(list));
}

}  // namespace weft
