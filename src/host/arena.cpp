#include "host/arena.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/memfd.hpp"
#include "base/mutant.hpp"
#include "base/poison.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"

namespace weft {

// A segment is a memfd that is mapped completely. New blocks are cut from its unused rest (`fresh`). Their
// pages are populated at once, unless the caller requests that each page is populated at its first use. A
// freed block becomes an extent of the cache. Adjacent extents are merged. The next block is cut from the
// smallest extent that is large enough. So only the first use of a page costs a page fault.
//
// An evacuated block keeps its address and gets other pages. They are the pages of a `donor`, a block that is
// allocated as usual, whose place in its segment is mapped a second time over the evacuated address range.
// From then on
//   - the address range is a separate `island`: it is reused, but never merged with the adjacent ranges,
//     because its pages do not lie next to theirs;
//   - the donor's own address range is never handed out: its pages are in use elsewhere;
//   - the old place is retired: its pages are returned to the system, no address of this process leads there.
// Meanwhile all groups are held. Calls in flight have published the old place, so a block that one of them
// uses is not moved. Later calls find the new place. A block that a failed call used may always be moved. A
// peer that still works on it learns of the failure before it can report success.
//
// find() reads a sorted list of moved ranges. Each evacuation publishes a new list. Old lists are kept until
// the arena is destroyed, since a reader may still use them. Evacuation is rare.
struct Arena::Impl {
  struct Segment {
    Descriptor descriptor;
    SharedMapping mapping;
    std::size_t fresh = 0;  // offset of the first byte never handed out
  };
  struct Moved {  // [begin, end) leads to `place`
    const std::byte* begin;
    const std::byte* end;
    SegmentPlace place;
  };
  using MovedRanges = std::vector<Moved>;  // sorted, disjoint
  struct Extent {
    std::size_t bytes;
    std::uint64_t island;  // adjacent extents of one island may be merged …
    // … if is_sparse is equal: some pages of a sparse extent were perhaps never populated
    bool is_sparse = false;
  };

  Impl(Logger& l, std::size_t bytes)
      : log(l),
        page(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))),
        host_pages(static_cast<std::size_t>(std::max(0l, ::sysconf(_SC_PHYS_PAGES)))),
        next_segment_bytes(round_up(bytes)) {}

  std::size_t round_up(std::size_t bytes) const { return (bytes + page - 1) / page * page; }

  Logger& log;
  const std::size_t page, host_pages;
  mutable std::mutex mutex;  // guards all members below, except those that find() reads
  std::size_t next_segment_bytes;
  std::uint64_t next_island = kMaxSegments;  // smaller numbers belong to the segments
  bool refusal_logged = false;

  std::map<std::byte*, Extent> blocks;                         // handed out (or in quarantine), by address
  std::map<std::byte*, Extent> cache;                          // free extents by address …
  std::set<std::pair<std::size_t, std::byte*>> cache_by_size;  // … and by size
  std::vector<std::byte*> quarantine;
  std::map<std::byte*, int> pins;  // for each block, how often it is pinned
  std::vector<BlockHolder*> holders;
  std::size_t in_use = 0, cached = 0, quarantined = 0, retired = 0;

  // the segments below segment_count_ do not change except for `fresh`
  std::array<Segment, kMaxSegments> segments;
  std::atomic<const MovedRanges*> moved{nullptr};
  std::vector<std::unique_ptr<const MovedRanges>> moved_history;

  void log_refusal(std::size_t bytes, int error) {
    if (std::exchange(refusal_logged, true)) return;
    log.write_later(
        LogLayer::host, LogLevel::info,
        fmt::format("shared memory of {} bytes cannot be allocated ({}); local memory is used instead, "
                    "and collectives on it copy",
                    bytes, system_words(error)));
  }

  void cache_insert(std::byte* begin, Extent e) {
    cached += e.bytes;
    poison(begin, e.bytes);
    const auto of_a_kind = [&e](const Extent& o) {
      return o.island == e.island && o.is_sparse == e.is_sparse;
    };
    auto next = cache.lower_bound(begin);
    if (next != cache.end() && of_a_kind(next->second) && next->first == begin + e.bytes) {
      e.bytes += next->second.bytes;
      next = cache_erase(next);
    }
    if (next != cache.begin()) {
      const auto previous = std::prev(next);
      if (of_a_kind(previous->second) && previous->first + previous->second.bytes == begin) {
        begin = previous->first;
        e.bytes += previous->second.bytes;
        cache_erase(previous);
      }
    }
    cache.emplace(begin, e);
    cache_by_size.emplace(e.bytes, begin);
  }

  std::map<std::byte*, Extent>::iterator cache_erase(std::map<std::byte*, Extent>::iterator i) {
    cache_by_size.erase({i->second.bytes, i->first});
    return cache.erase(i);
  }

  bool held(std::byte* block, std::size_t bytes) const {
    return pins.count(block) > 0 || std::any_of(holders.begin(), holders.end(),
                                                [&](const BlockHolder* h) { return h->holds(block, bytes); });
  }

  void look_at_quarantine() {
    for (std::size_t i = 0; i < quarantine.size();) {
      const auto block = blocks.find(quarantine[i]);
      if (held(block->first, block->second.bytes)) {
        ++i;
        continue;
      }
      quarantined -= block->second.bytes;
      cache_insert(block->first, block->second);
      blocks.erase(block);
      quarantine[i] = quarantine.back();
      quarantine.pop_back();
    }
  }

  // Populates all pages at once, because single page faults are expensive. Returns false if there is no
  // memory for the pages (a cgroup's limit). An error now is better than a signal later. A kernel that does
  // not know this request populates the pages later, one by one.
  static bool populate(std::byte* data, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
    while (::madvise(data, bytes, MADV_POPULATE_WRITE) != 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return errno == EINVAL || errno == ENOSYS;
    }
#endif
    return true;
  }

  static void punch_hole(int fd, std::uint64_t offset, std::size_t bytes) {
    ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes));
  }

  SegmentPlace place_of(const std::byte* p, std::uint32_t count) const {
    if (const MovedRanges* ranges = moved.load(std::memory_order_acquire)) {
      auto after = std::upper_bound(ranges->begin(), ranges->end(), p,
                                    [](const std::byte* q, const Moved& m) { return q < m.begin; });
      if (after != ranges->begin() && p < std::prev(after)->end) {
        const Moved& m = *std::prev(after);
        return {m.place.segment, m.place.offset + static_cast<std::uint64_t>(p - m.begin)};
      }
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      const SharedMapping& m = segments[i].mapping;
      if (p >= m.data() && p < m.data() + m.bytes()) return {i, static_cast<std::uint64_t>(p - m.data())};
    }
    return {kMaxSegments, 0};
  }

  // Returns a list in which the added range has its new place, and every other range keeps its present place.
  static MovedRanges with(const MovedRanges* old, const Moved& added) {
    MovedRanges ranges;
    for (const Moved& m : old ? *old : MovedRanges{}) {
      if (m.begin < added.begin) ranges.push_back({m.begin, std::min(m.end, added.begin), m.place});
      if (m.end > added.end) {
        const auto from = std::max(m.begin, added.end);
        ranges.push_back(
            {from, m.end, {m.place.segment, m.place.offset + static_cast<std::uint64_t>(from - m.begin)}});
      }
    }
    ranges.push_back(added);
    std::sort(ranges.begin(), ranges.end(), [](const Moved& a, const Moved& b) { return a.begin < b.begin; });
    return ranges;
  }
};

Arena::Arena(Logger& log, std::size_t segment_bytes) : impl_(std::make_unique<Impl>(log, segment_bytes)) {}

Arena::~Arena() {
  for (const auto& [begin, extent] : impl_->cache)
    unpoison(begin, extent.bytes);  // other mappings may get these addresses
}

// Adds a segment of the usual size, or of `bytes` if that is more. If the system refuses, it tries half the
// size, and so on. If the system grants a size after a refusal, the size is halved once more, so that the
// other parts of the program get as much as the arena. If the address space is limited (RLIMIT_AS), the usual
// size is an eighth of the remaining address space, because segments of other ranks are mapped, too. Only a
// segment that `bytes` requires may use the last quarter.
bool Arena::add_segment(std::size_t bytes) {
  Impl& a = *impl_;
  const std::uint32_t index = segment_count();
  if (index == kMaxSegments) {
    a.log_refusal(bytes, ENOSPC);
    return false;
  }
  a.next_segment_bytes = std::min(a.next_segment_bytes, a.round_up(addresses_left() / 8));
  bool refused = false;
  for (std::size_t size = leaves_addresses(a.next_segment_bytes) ? std::max(a.next_segment_bytes, bytes)
                                                                 : bytes;
       ; size = std::max(a.round_up(size / 2), bytes)) {
    Descriptor fd = make_memfd("weft-segment", size);
    SharedMapping mapping = fd ? SharedMapping::map(fd.get(), size) : SharedMapping();
    if (mapping && (!refused || size == bytes)) {
      a.segments[index].descriptor = std::move(fd);
      a.segments[index].mapping = std::move(mapping);
      segment_count_.store(index + 1, std::memory_order_release);
      return true;
    }
    if (mapping) {
      refused = false;
    } else {
      const int error = errno;
      if (size == bytes) {
        a.log_refusal(bytes, error);
        return false;
      }
      refused = true;
    }
    a.next_segment_bytes = a.round_up(size / 2);
  }
}

std::byte* Arena::take(std::size_t bytes, Pages pages) {
  Impl& a = *impl_;
  if (const auto found = a.cache_by_size.lower_bound({bytes, nullptr}); found != a.cache_by_size.end()) {
    const auto i = a.cache.find(found->second);
    std::byte* block = i->first;
    Impl::Extent e = i->second;
    a.cache_erase(i);
    a.cached -= e.bytes;
    if (e.bytes > bytes) a.cache_insert(block + bytes, {e.bytes - bytes, e.island, e.is_sparse});
    e.bytes = bytes;
    if (e.is_sparse && pages == Pages::now) {
      if (!Impl::populate(block, bytes)) {
        const int error = errno;
        a.cache_insert(block, e);
        a.log_refusal(bytes, error);
        return nullptr;
      }
      e.is_sparse = false;
    }
    unpoison(block, bytes);
    a.blocks.emplace(block, e);
    return block;
  }
  const auto cut = [&](std::uint32_t index) -> std::byte* {
    Impl::Segment& s = a.segments[index];
    if (s.mapping.bytes() - s.fresh < bytes) return nullptr;
    std::byte* block = s.mapping.data() + s.fresh;
    if (pages == Pages::now && !Impl::populate(block, bytes)) {
      const int error = errno;
      Impl::punch_hole(s.descriptor.get(), s.fresh, bytes);
      a.log_refusal(bytes, error);
      return nullptr;
    }
    a.blocks.emplace(block, Impl::Extent{bytes, index, pages == Pages::at_first_use});
    s.fresh += bytes;
    return block;
  };
  const std::uint32_t count = segment_count();
  for (std::uint32_t i = 0; i < count; ++i)
    if (a.segments[i].mapping.bytes() - a.segments[i].fresh >= bytes) return cut(i);
  return add_segment(bytes) ? cut(count) : nullptr;
}

void* Arena::allocate(std::size_t bytes, Pages pages) {
  Impl& a = *impl_;
  if (bytes > PTRDIFF_MAX - a.page) return nullptr;
  bytes = a.round_up(std::max<std::size_t>(bytes, 1));
  std::byte* block = nullptr;
  {
    const std::lock_guard lock(a.mutex);
    if (!a.quarantine.empty()) a.look_at_quarantine();
    // populate() would take all of the host's pages from other programs before it noticed that there are too
    // few.
    if (bytes / a.page > a.host_pages)
      a.log_refusal(bytes, ENOMEM);
    else
      block = take(bytes, pages);
    if (block != nullptr) a.in_use += bytes;
  }
  if (block == nullptr) a.log.flush();  // logs the reason
  return block;
}

void Arena::release(void* data) noexcept { release(data, true); }

void Arena::release_unnamed(void* data) noexcept { release(data, false); }

void Arena::release(void* data, bool named) noexcept {
  Impl& a = *impl_;
  auto* block = static_cast<std::byte*>(data);
  const std::lock_guard lock(a.mutex);
  const auto i = a.blocks.find(block);
  if (i == a.blocks.end()) return;
  a.in_use -= i->second.bytes;
  if (named && a.held(block, i->second.bytes)) {
    a.quarantined += i->second.bytes;
    a.quarantine.push_back(block);
    return;
  }
  a.cache_insert(block, i->second);
  a.blocks.erase(i);
}

bool Arena::ensure_segment() noexcept {
  if (segment_count() > 0) return true;
  try {
    const std::lock_guard lock(impl_->mutex);
    return segment_count() > 0 || add_segment(impl_->page);
  } catch (...) {
    return false;
  }
}

std::size_t Arena::segment_bytes(std::uint32_t segment) const noexcept {
  return segment < segment_count() ? impl_->segments[segment].mapping.bytes() : 0;
}

std::byte* Arena::segment_base(std::uint32_t segment) const noexcept {
  return segment < segment_count() ? impl_->segments[segment].mapping.data() : nullptr;
}

int Arena::segment_descriptor(std::uint32_t segment) const noexcept {
  return segment < segment_count() ? impl_->segments[segment].descriptor.get() : -1;
}

std::optional<SegmentPlace> Arena::find(const void* data, std::size_t bytes) const noexcept {
  const auto* begin = static_cast<const std::byte*>(data);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  if (bytes > UINTPTR_MAX - address) return std::nullopt;
  const std::byte* end = begin + bytes;
  if (const Impl::MovedRanges* ranges = impl_->moved.load(std::memory_order_acquire)) {
    // The first range that ends behind `begin`. The buffer lies completely inside or completely outside of
    // this range; a buffer that lies only partly inside has no place.
    const auto m = std::partition_point(ranges->begin(), ranges->end(),
                                        [&](const Impl::Moved& r) { return r.end <= begin; });
    if (m != ranges->end() && m->begin < std::max(end, begin + 1)) {
      if (begin < m->begin || end > m->end) return std::nullopt;
      return SegmentPlace{m->place.segment, m->place.offset + static_cast<std::uint64_t>(begin - m->begin)};
    }
  }
  const std::uint32_t count = segment_count();
  for (std::uint32_t i = 0; i < count; ++i) {
    const SharedMapping& s = impl_->segments[i].mapping;
    if (begin >= s.data() && begin < s.data() + s.bytes()) {
      if (end > s.data() + s.bytes()) return std::nullopt;
      return SegmentPlace{i, static_cast<std::uint64_t>(begin - s.data())};
    }
  }
  return std::nullopt;
}

Arena::Version Arena::version() const noexcept {
  return {impl_->moved.load(std::memory_order_acquire), segment_count()};
}

// A block that gets other pages.
struct Arena::Move {
  std::byte* block;
  std::size_t bytes;
  SegmentPlace from, to;
  std::byte* donor;
};

namespace {

// how long the arena waits for holders to finish their step
constexpr auto kStandStill = std::chrono::milliseconds(100);
constexpr auto kStandStillNap = std::chrono::microseconds(50);

// All holders are held while this object exists.
class StandStill {
 public:
  explicit StandStill(const std::vector<BlockHolder*>& holders) {
    stopped_.reserve(holders.size());
    for (BlockHolder* const h : holders) {
      if (!h->stand_still()) {
        all_ = false;
        return;
      }
      stopped_.push_back(h);
    }
  }
  ~StandStill() {
    for (BlockHolder* const h : stopped_) h->go_on();
  }
  StandStill(const StandStill&) = delete;
  StandStill& operator=(const StandStill&) = delete;
  bool all() const noexcept { return all_; }

 private:
  std::vector<BlockHolder*> stopped_;
  bool all_ = true;
};

// Pages that drivers hold permanently (verbs, registered buffers of io_uring, VFIO). The kernel counts these
// pages, but does not report which they are.
bool has_pinned_pages() {
  FileIn status("/proc/self/status");
  for (std::string word; status >> word;)
    if (std::uint64_t kilobytes = 0; word == "VmPin:") return status >> kilobytes && kilobytes > 0;
  return false;
}

}  // namespace

bool Arena::evacuate(void* data, std::size_t bytes) noexcept try {
  if (bytes > PTRDIFF_MAX) return false;
  for (const Deadline patience = Deadline::after(kStandStill);;) {
    const Outcome outcome = try_evacuate(static_cast<std::byte*>(data), std::max<std::size_t>(bytes, 1));
    if (outcome != Outcome::later || patience.passed()) return outcome == Outcome::moved;
    // without the lock, because a holder in the middle of a step may need it
    std::this_thread::sleep_for(kStandStillNap);
  }
} catch (...) {
  return false;
}

Arena::Outcome Arena::try_evacuate(std::byte* begin, std::size_t bytes) {
  Impl& a = *impl_;
  const std::lock_guard lock(a.mutex);
  std::vector<Move> moves;
  if (!find_moves(begin, bytes, moves)) return Outcome::refused;
  const auto pinned = [&](const Move& m) { return a.pins.count(m.block) > 0; };
  if (std::any_of(moves.begin(), moves.end(), pinned) || has_pinned_pages()) return Outcome::refused;
  if (WEFT_MUTANT("moved_in_use")) return carry_out(moves) ? Outcome::moved : Outcome::refused;
  const StandStill still(a.holders);
  if (!still.all()) return Outcome::later;
  for (const Move& m : moves)
    for (const BlockHolder* const h : a.holders)
      if (h->uses(m.block, m.bytes)) return Outcome::refused;
  return carry_out(moves) ? Outcome::moved : Outcome::refused;
}

// Finds the block in which `begin` lies and the blocks behind it, up to the end. Returns false if there is a
// gap between the blocks.
bool Arena::find_moves(std::byte* begin, std::size_t bytes, std::vector<Move>& moves) const {
  const Impl& a = *impl_;
  std::byte* const end = begin + bytes;
  auto i = a.blocks.upper_bound(begin);
  if (i == a.blocks.begin()) return false;
  --i;
  const std::uint32_t count = segment_count();
  for (const std::byte* reached = begin; reached < end; ++i) {
    if (i == a.blocks.end() || i->first > reached || i->first + i->second.bytes <= reached) return false;
    reached = i->first + i->second.bytes;
    moves.push_back({i->first, i->second.bytes, a.place_of(i->first, count), {}, nullptr});
  }
  return true;
}

bool Arena::carry_out(std::vector<Move>& moves) {
  Impl& a = *impl_;
  // Donors return to the cache like any block. (Memory that a peer may still access would be in quarantine.)
  const auto give_back_donors = [&] {
    for (const Move& m : moves) {
      if (m.donor == nullptr) continue;
      const auto donor = a.blocks.find(m.donor);
      a.cache_insert(donor->first, donor->second);
      a.blocks.erase(donor);
    }
  };
  for (Move& m : moves) {
    m.donor = take(m.bytes, Pages::now);
    if (m.donor == nullptr) {
      give_back_donors();
      return false;
    }
    m.to = a.place_of(m.donor, segment_count());
    std::memcpy(m.donor, m.block, m.bytes);
  }

  auto ranges = std::make_unique<Impl::MovedRanges>();
  if (const auto* now = a.moved.load(std::memory_order_relaxed)) *ranges = *now;
  for (const Move& m : moves) *ranges = Impl::with(ranges.get(), {m.block, m.block + m.bytes, m.to});
  a.moved_history.reserve(a.moved_history.size() + 1);

  const auto map_over = [&](std::byte* address, std::size_t length, SegmentPlace place) {
    void* got = ::mmap(address, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                       a.segments[place.segment].descriptor.get(), static_cast<off_t>(place.offset));
    if (got == MAP_FAILED) return false;
    mark_shared(address, length);
    return true;
  };
  for (std::size_t k = 0; k < moves.size(); ++k) {
    if (map_over(moves[k].block, moves[k].bytes, moves[k].to)) continue;
    for (std::size_t j = 0; j <= k; ++j) map_over(moves[j].block, moves[j].bytes, moves[j].from);
    give_back_donors();
    return false;
  }

  a.moved.store(ranges.get(), std::memory_order_release);
  a.moved_history.push_back(std::move(ranges));
  for (const Move& m : moves) {
    a.blocks.erase(m.donor);
    Impl::Extent& moved = a.blocks.find(m.block)->second;
    moved.island = a.next_island++;
    moved.is_sparse = false;
    Impl::punch_hole(a.segments[m.from.segment].descriptor.get(), m.from.offset, m.bytes);
    a.retired += m.bytes;
  }
  return true;
}

bool Arena::pin(const void* data, std::size_t bytes) {
  Impl& a = *impl_;
  if (bytes > PTRDIFF_MAX) return false;
  const std::lock_guard lock(a.mutex);
  std::vector<Move> touched;
  if (!find_moves(static_cast<std::byte*>(const_cast<void*>(data)), std::max<std::size_t>(bytes, 1), touched))
    return false;
  for (const Move& m : touched) ++a.pins[m.block];
  return true;
}

void Arena::unpin(const void* data, std::size_t bytes) noexcept {
  Impl& a = *impl_;
  const auto* const end = static_cast<const std::byte*>(data) + std::max<std::size_t>(bytes, 1);
  const std::lock_guard lock(a.mutex);
  auto i = a.pins.upper_bound(static_cast<std::byte*>(const_cast<void*>(data)));
  if (i != a.pins.begin()) --i;
  while (i != a.pins.end() && i->first < end) {
    const bool touched = i->first + a.blocks.at(i->first).bytes > data;
    i = touched && --i->second == 0 ? a.pins.erase(i) : std::next(i);
  }
}

void Arena::add_holder(BlockHolder* holder) {
  const std::lock_guard lock(impl_->mutex);
  impl_->holders.push_back(holder);
}

void Arena::remove_holder(const BlockHolder* holder) noexcept {
  const std::lock_guard lock(impl_->mutex);
  auto& holders = impl_->holders;
  holders.erase(std::remove(holders.begin(), holders.end(), holder), holders.end());
}

Arena::Counters Arena::counters() const {
  const std::lock_guard lock(impl_->mutex);
  return {impl_->in_use, impl_->cached, impl_->quarantined, impl_->retired};
}

}  // namespace weft
