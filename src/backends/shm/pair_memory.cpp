#include "backends/shm/pair_memory.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/shared_words.hpp"
#include "weft/host/context.hpp"

namespace weft::shm {
namespace {

constexpr int kSegmentShift = 48;  // a place has 1 + segment above this bit, and the offset below
constexpr std::uint64_t kOffset = (std::uint64_t{1} << kSegmentShift) - 1;

// The memory of each pair and direction begins at a different line of a page. Ranks go through both
// directions at the same pace. If both were at the same place in their pages, loads would wait for stores
// whose addresses differ only above bit 12 (1 KiB there and back would take 20 % longer).
constexpr std::size_t kPage = 4096;
constexpr int kLinesApart = 22;
std::size_t line_in_page(int from, int to, int size) noexcept {
  return static_cast<std::size_t>(from * size + to) * kLinesApart % (kPage / kLine) * kLine;
}

std::byte* allocate(Arena* arena, std::size_t bytes) noexcept {
  if (arena != nullptr) return static_cast<std::byte*>(arena->allocate(bytes, Arena::Pages::at_first_use));
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  // because a huge page would be larger than the memory of several pairs
  ::madvise(data, bytes, MADV_NOHUGEPAGE);
  return static_cast<std::byte*>(data);
}
void release(Arena* arena, std::byte* memory, std::size_t bytes) noexcept {
  if (arena != nullptr)
    arena->release_unnamed(memory);
  else
    ::munmap(memory, bytes);
}

}  // namespace

// The memory of groups that have ended on this rank, but not yet on all other ranks. It belongs to a Context.
class PairMemory::Kept {
 public:
  explicit Kept(Context& context) : context_(context) {}
  ~Kept() {
    if (context_.forked()) return;
    for (const Left& l : all_)
      // possible, because all groups of this process have ended
      release(l.arena, l.block.memory, l.block.bytes);
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  struct Left {
    Block block;
    Arena* arena;  // null for plain memory
    RegionRef region;
    Control control;
    PeerProcessRef process;  // the process of rank block.to

    bool is_over() const noexcept {
      return control.rank(block.to).left.load(std::memory_order_seq_cst) == kLeft ||
             (!process->is_self() && !process->alive());
    }
  };
  void add(Left left) {
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(left));
  }
  void sweep() noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const Left& l) {
      if (!l.is_over()) return false;
      release(l.arena, l.block.memory, l.block.bytes);
      return true;
    });
  }

 private:
  Context& context_;
  std::mutex mutex_;
  std::vector<Left> all_;
};

PairMemory::PairMemory(const Group& group) : group_(group) { group.context.attached<Kept>().sweep(); }

PairMemory::~PairMemory() {
  if (blocks_.empty() || group_.context.forked()) return;
  Arena* const arena = group_.one_process ? nullptr : &arena_of(group_.context);
  for (const Block& b : blocks_) {
    Kept::Left left{b, arena, group_.region, group_.control,
                    group_.processes[static_cast<std::size_t>(b.to)]};
    if (left.is_over()) {
      release(arena, b.memory, b.bytes);
      continue;
    }
    try {
      group_.context.attached<Kept>().add(std::move(left));
    } catch (...) {  // out of memory: the memory is never freed
    }
  }
}

std::byte* PairMemory::of_all_pairs(int from, int to) const noexcept {
  const int index = from * group_.size + to;
  return group_.all_pairs->data + static_cast<std::size_t>(index) * sizeof(Pair);
}

std::byte* PairMemory::make(int to, std::size_t bytes) {
  if (!usable()) return of_all_pairs(group_.rank, to);
  group_.context.attached<Kept>().sweep();
  blocks_.reserve(blocks_.size() + 1);
  const std::size_t skipped = line_in_page(group_.rank, to, group_.size);
  std::byte* const memory =
      allocate(group_.one_process ? nullptr : &arena_of(group_.context), skipped + bytes);
  if (memory == nullptr)
    throw Error(ErrorCode::system,
                fmt::format("rank {} has no {} bytes of shared memory for the data that it sends to rank {}",
                            group_.rank, bytes, to));
  blocks_.push_back({memory, skipped + bytes, to});
  return memory + skipped;
}

std::uint64_t PairMemory::place(const std::byte* memory, std::size_t bytes) const noexcept {
  if (group_.one_process || !usable()) return reinterpret_cast<std::uint64_t>(memory);
  group_.show_segments();
  const auto place = arena_of(group_.context).find(memory, bytes);
  return place ? (std::uint64_t{place->segment} + 1) << kSegmentShift | place->offset
               : 0;  // the memory belongs to the arena
}

bool PairMemory::is_mapped(int to, std::uint64_t place) const noexcept {
  return group_.one_process || !usable() || group_.processes[static_cast<std::size_t>(to)]->is_self() ||
         group_.control.mapped(to, group_.rank).load(std::memory_order_seq_cst) >= place >> kSegmentShift;
}

std::byte* PairMemory::find(int from, std::uint64_t place, std::size_t bytes) const {
  if (!usable()) return of_all_pairs(from, group_.rank);
  if (group_.one_process) return reinterpret_cast<std::byte*>(place);
  const std::uint64_t segment = (place >> kSegmentShift) - 1;
  const PeerProcess& process = *group_.processes[static_cast<std::size_t>(from)];
  const auto look = [&] { return process.find(segment, place & kOffset, static_cast<std::int64_t>(bytes)); };
  if (place % kLine == 0) {
    if (std::byte* const memory = look()) return memory;
    group_.map_news(from);
    if (std::byte* const memory = look()) return memory;
    if (process.is_refused(segment))
      throw Error(Failure{
          .code = ErrorCode::system,
          .text = fmt::format(
              "rank {} cannot map the segment of rank {} that holds the data sent to it; the log says why",
              group_.rank, from),
          .ranks = {group_.rank}});
    if (segment < group_.of(from).segments.load(std::memory_order_seq_cst) && segment < Arena::kMaxSegments &&
        process.segment(static_cast<std::uint32_t>(segment)) == nullptr)
      return nullptr;
  }
  throw Error(damaged(from, fmt::format("the place of its memory for rank {}", group_.rank), place,
                      "bytes of a segment that is mapped"));
}

}  // namespace weft::shm
