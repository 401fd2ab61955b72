// Regions: memory mapped by several processes or threads. The process that made a region offers it by name.
// Functions whose comment names a mutex are thread-safe.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "base/memfd.hpp"

namespace weft {

class PeerProcess;

/// Memory mapped by several processes or threads: a group's control block. A new region is filled with zeros.
/// It is unmapped when its last owner is destroyed, and is excluded from forked children and from core dumps.
struct Region {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};
using RegionRef = std::shared_ptr<const Region>;

struct OfferTable;

// A region with its mapping. In the process that offers the region, it also holds the entry in that process's
// table. In other processes, it holds the PeerProcess of the offering process. This keeps that object alive,
// so that a second open() finds this mapping.
struct HeldRegion : Region {
  SharedMapping mapping;
  Descriptor memfd;
  int refusal = 0;  // the errno, if the system refused a memfd
  std::uint64_t id = 0;
  std::string name;
  std::weak_ptr<OfferTable> offers;
  std::shared_ptr<PeerProcess> from;
  pid_t process = ::getpid();

  explicit HeldRegion(SharedMapping m) : mapping(std::move(m)) {
    data = mapping.data();
    bytes = mapping.bytes();
  }
  HeldRegion(const HeldRegion&) = delete;
  HeldRegion& operator=(const HeldRegion&) = delete;
  ~HeldRegion();
};

// The regions that this process offers, by name. The thread that serves the socket shares this object.
struct OfferTable {
  std::mutex mutex;
  std::condition_variable added;
  std::map<std::string, std::pair<std::uint64_t, std::weak_ptr<HeldRegion>>, std::less<>>
      regions;  // id, region
  std::uint64_t next_id = 1;
  std::uint64_t numbers_given = 0;  // how many numbers next_region_number() has returned

  std::shared_ptr<HeldRegion> find(std::string_view name) {
    const auto i = regions.find(name);
    return i == regions.end() ? nullptr : i->second.second.lock();
  }
};

}  // namespace weft
