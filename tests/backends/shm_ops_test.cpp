// Tests of shared memory alone: every operation on each of its paths, with memory that some ranks share and
// others do not, in any order and many at once, against values computed here; the
// errors of ranks that call different things; which rank may run ahead of which.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <random>
#include <span>

#include "backends/shm/control.hpp"
#include "backends/shm/paths.hpp"
#include "base/text/plain_streams.hpp"
#include "host/cores/usable_cores.hpp"
#include "support/pair_from_here.hpp"
#include "support/random_calls.hpp"
#include "support/shm_settings.hpp"
#include "support/temporary_folder.hpp"
#include "support/values.hpp"

namespace weft::test::shm_ops_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

enum class Where { shared, foreign, mixed };

struct RandomCase {
  Ranks kind;
  int size;
  Where where;
  const char* path;
};

class AtRandom : public testing::TestWithParam<RandomCase> {};

std::vector<RandomCase> random_cases() {
  std::vector<RandomCase> all;
  for (const int n : {2, 3, 5}) {
    for (const char* path : {"", "direct", "staged", "inline", "single"})
      all.push_back({Ranks::threads, n, Where::mixed, path});
    if (!kProcesses) continue;
    for (const Where where : {Where::shared, Where::foreign, Where::mixed})
      all.push_back({Ranks::processes, n, where, ""});
    all.push_back({Ranks::processes, n, Where::shared, "direct"});
  }
  return all;
}

std::string case_name(const testing::TestParamInfo<RandomCase>& info) {
  const RandomCase& c = info.param;
  return to_string(c.kind) + std::to_string(c.size) +
         (c.where == Where::shared    ? "_shared"
          : c.where == Where::foreign ? "_foreign"
                                      : "_mixed") +
         (*c.path ? std::string("_") + c.path : "");
}

INSTANTIATE_TEST_SUITE_P(Shm, AtRandom, testing::ValuesIn(random_cases()), case_name);

// Hundreds of calls, many in flight, waited for in an order of each rank's own. The ring of arrivals, the
// staging buffers and the tables of blocks are used again and again, by another operation each time.
TEST_P(AtRandom, AllOperationsInterleaved) {
  const RandomCase c = GetParam();
  RankOptions options;
  options.hooks.path = c.path;
  run_ranks(
      c.kind, c.size,
      [&](Rank& r) {
        const std::int64_t inlined = static_cast<std::int64_t>(shm::kInlineBytes) / 4;
        Variety variety;
        variety.reductions.push_back(ReduceOp::premul_sum(3));
        if (std::string(c.path) == "inline")
          variety.few = {0, 1, 2, 3, 7, 13, 31};  // five blocks of them fit beside an arrival
        else
          variety.many = {0, 1, 13, inlined / r.size, inlined, inlined + 1, 1009, 5003, 40009};
        std::optional<Memory> memory;
        if (c.where != Where::mixed) memory = c.where == Where::shared ? Memory::shared : Memory::local;
        calls_at_random(r, r.group(), 400,
                        std::mt19937(static_cast<unsigned>(7 * c.size + std::string(c.path).size())),
                        std::mt19937(static_cast<unsigned>(100 + r.rank)), variety, memory);
      },
      options);
}

class Shm : public OnShm {
 protected:
  static Tensor buffer(Rank& r, std::int64_t count, DType dtype = DType::f32) {
    const Tensor t(r.context, Shape{count}, dtype, GetParam().memory);
    for (std::int64_t i = 0; i < count; ++i) store(t, i, value(r.rank, i));
    return t;
  }
};
INSTANTIATE_TEST_SUITE_P(Shm, Shm, testing::ValuesIn(shm_settings()),
                         [](const auto& setting) { return to_string(setting.param); });

// A rank posts two calls while the ring is full; before they start, there is room for both. The first must be
// published first: a rank that sees the second call also compares the first.
TEST_P(Shm, CallsArePublishedInTheirOrder) {
  run(3, [](Rank& r) {
    const Tensor t = buffer(r, 2), first = t.slice_flat(0, Shape{1});
    std::vector<Work> works;
    const auto broadcast = [&] { works.push_back(r.group().broadcast(t, t, 2)); };
    for (std::uint64_t k = 0; k < shm::kRing; ++k) works.push_back(r.group().broadcast(first, first, 2));
    r.meet("the ring is full");
    if (r.rank == 0) {
      broadcast();  // no room: the others have not read the ring
      for (std::uint64_t k = 0; k < shm::kRing; ++k) works[k].wait();
      static_cast<void>(works.back().done());  // reads what it had not compared
      r.meet("rank 0 has read");
      r.meet("all have read");
      works.push_back(r.group().barrier());
      r.meet("posted");
      r.meet("looked");
    } else {
      r.meet("rank 0 has read");
      broadcast();
      if (r.rank == 2) works.back().wait();
      r.store->add("read", 1);
      while (r.store->try_get("read") != "2") static_cast<void>(works.back().done());
      r.meet("all have read");
      r.meet("posted");
      works.push_back(r.group().barrier());
      EXPECT_NO_THROW(static_cast<void>(works.back().wait_for(20ms)));  // a stale line would be a mismatch
      r.meet("looked");
    }
    for (Work& w : works) w.wait();
    EXPECT_EQ(load(t, 1), value(2, 1));
  });
}

// The root of a scatter waits for nobody: it is several rings ahead before the others arrive.
TEST_P(Shm, TheRootOfAScatterRunsAhead) {
  run(3, [](Rank& r) {
    constexpr int kCalls = 12;
    std::vector<Tensor> outs;
    r.group().barrier().wait();
    if (r.rank != 1) r.meet("the root is done");
    for (int k = 0; k < kCalls; ++k) {
      const Tensor in = buffer(r, 21);
      outs.push_back(buffer(r, 7));
      r.group().scatter(in, outs.back(), 1).wait();
      store(in, 0, 50);  // the root's again
    }
    if (r.rank == 1) r.meet("the root is done");
    for (const Tensor& out : outs)
      for (int i = 0; i < 7; ++i) ASSERT_EQ(load(out, i), value(1, r.rank * 7 + i));
    r.group().barrier().wait();
  });
}

// Small, but not tiny. If all memory is shared, no payload travels with the arrival line. If some is not, all
// payload does.
TEST(ShmSmall, CallsAreDoneInPlaceWhereAllShare) {
  if (!kProcesses) GTEST_SKIP() << "all ranks are threads here, whose memory is always shared";
  for (const int n : {2, 3}) {
    const std::int64_t from = shm::in_place_from(n), most = shm::inline_bytes(Op::all_gather);
    ASSERT_LE(from, shm::inline_bytes(Op::all_reduce));
    ASSERT_LT(from, most);
    run_ranks(Ranks::processes, n, [&](Rank& r) {
      RankOptions options = r.options;
      int copies = 0;
      options.hooks.in_chunk = [&](std::uint64_t) { ++copies; };
      Rank me(r.rank, r.size, r.context, r.store, options);
      for (const std::int64_t bytes : {from - 4, from, most}) {
        for (const int sharing : {0, 1, n}) {  // so many of the ranks
          const std::int64_t count = bytes / 4;
          const Memory memory = r.rank < sharing ? Memory::shared : Memory::local;
          const auto tensor = [&](std::int64_t c) { return Tensor(r.context, Shape{c}, DType::f32, memory); };
          const Tensor in = tensor(count), out = tensor(count), all = tensor(n * count);
          for (std::int64_t i = 0; i < count; ++i) store(in, i, value(r.rank, i));
          copies = 0;
          me.group().all_reduce(in, out).wait();
          const int reduced_in_place = copies;
          for (std::int64_t i = 0; i < count; ++i)
            ASSERT_EQ(load(out, i), combined(ReduceOp::sum, DType::f32, n, i));
          me.group().all_gather(in, all).wait();
          for (std::int64_t i = 0; i < n * count; ++i)
            ASSERT_EQ(load(all, i), value(static_cast<int>(i / count), i % count))
                << bytes << " bytes, " << sharing << " share";
          const bool in_place = sharing == n && bytes >= from;
          EXPECT_EQ(reduced_in_place, in_place ? 1 : 0) << bytes << " bytes, " << sharing << " share";
          EXPECT_EQ(copies - reduced_in_place, in_place ? 1 : 0)
              << bytes << " bytes, " << sharing << " share";
        }
      }
    });
  }
}

TEST_P(Shm, EverythingEmpty) {
  run(3, [](Rank& r) {
    const Tensor none = buffer(r, 0);
    const std::int64_t zeros[] = {0, 0, 0};
    for (int round = 0; round < 20; ++round) {
      ProcessGroup& g = r.group();
      g.all_gather_v(none, none, {zeros}).wait();
      g.reduce_scatter_v(none, none, {zeros}).wait();
      g.all_to_all_v(none, none, {zeros}, {zeros}).wait();
      g.all_to_all(none, none).wait();
      g.gather(none, none, round % 3).wait();
      g.scatter(none, none, round % 3).wait();
      g.reduce(none, none, round % 3).wait();
      // Large buffers of which nothing is moved.
      const Tensor big = buffer(r, 5000), other = buffer(r, 5000);
      g.all_to_all_v(big, other, {zeros}, {zeros}).wait();
      g.reduce_scatter_v(big, none, {zeros}).wait();
      for (int i = 0; i < 5000; ++i) ASSERT_EQ(load(other, i), value(r.rank, i));
    }
  });
}

// The sum lies in the staging buffer of a rank that reads it. That rank must copy the sum before it stages
// its next round there. There are many rounds, by more ranks than cores.
TEST(ShmStaged, SumsAreCopiedBeforeTheirBufferIsFilledAgain) {
  RankOptions options;
  options.hooks.path = "staged";
  run_ranks(
      Ranks::threads, 7,
      [](Rank& r) {
        const std::int64_t count = 48 * static_cast<std::int64_t>(shm::kStageBytes) / 4 + 5;
        const Tensor in(r.context, Shape{count}, DType::f32), out(r.context, Shape{count}, DType::f32);
        const std::span<float> sums = out.as<float>();
        for (int round = 0; round < 12; ++round) {
          std::ranges::fill(in.as<float>(), static_cast<float>((r.rank + 1) * (round + 1)));
          std::ranges::fill(sums, -1.0f);
          const bool all = round % 2 == 0, takes = all || r.rank == 1;
          if (all) {
            r.group().all_reduce(in, out).wait();
          } else {
            r.group().reduce(in, out, 1).wait();
          }
          const float expected = takes ? static_cast<float>(28 * (round + 1)) : -1.0f;
          const auto wrong = std::ranges::find_if(sums, [&](float x) { return x != expected; });
          ASSERT_EQ(wrong, sums.end()) << "round " << round << ", element " << wrong - sums.begin()
                                       << ": got " << *wrong << "; expected " << expected;
        }
      },
      options);
}

// A control region in memory of its own, none of which is there yet.
class FreshRegion {
 public:
  static constexpr std::size_t kPage = 4096;
  explicit FreshRegion(int ranks)
      : bytes_(shm::Control::bytes(ranks)),
        data_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0)),
        control_(static_cast<std::byte*>(data_), ranks) {
    EXPECT_NE(data_, MAP_FAILED);
    ::madvise(data_, bytes_, MADV_NOHUGEPAGE);
  }
  ~FreshRegion() { ::munmap(data_, bytes_); }
  FreshRegion(const FreshRegion&) = delete;
  FreshRegion& operator=(const FreshRegion&) = delete;
  const shm::Control* operator->() const { return &control_; }
  std::span<const std::byte> all() const { return {static_cast<const std::byte*>(data_), bytes_}; }
  // The pages that have been touched.
  std::vector<unsigned char> pages() const {
    std::vector<unsigned char> there((bytes_ + kPage - 1) / kPage);
    EXPECT_EQ(::mincore(data_, bytes_, there.data()), 0);
    for (unsigned char& page : there) page &= 1;
    return there;
  }
  bool has(const void* at) const {
    return pages()[static_cast<std::size_t>(static_cast<const std::byte*>(at) - all().data()) / kPage] != 0;
  }

 private:
  std::size_t bytes_;
  void* data_;
  shm::Control control_;
};

// On a machine with several memory nodes, the words of a rank that others poll lie on that rank's node.
TEST(ShmControl, ARankTouchesWhatOthersPollAndNothingElse) {
  constexpr int kRanks = 3;
  const FreshRegion region(kRanks);
  region->touch(1);
  for (int r = 0; r < kRanks; ++r) {
    for (std::size_t k = 1; k + 1 < shm::kRing; ++k)
      EXPECT_EQ(region.has(&region->rank(r).arrivals[k]), r == 1) << "rank " << r << ", line " << k;
    EXPECT_FALSE(region.has(region->stage(r, 0)));
  }
  EXPECT_TRUE(std::ranges::all_of(region.all(), [](std::byte b) { return b == std::byte{0}; }));
}

TEST(ShmControl, RanksOfSeveralMemoryNodesTouchTheHeadsOfTheirLinesAlone) {
  constexpr int kRanks = 32;
  const FreshRegion region(kRanks);
  for (int r = 0; r < kRanks; ++r) region->touch(r);
  const std::vector<unsigned char> pages = region.pages();
  EXPECT_LE(std::accumulate(pages.begin(), pages.end(), std::size_t{0}), kRanks * (shm::kRing + 2));
}

// The bytes that the control region of a group of n ranks takes, of all of them. Asked in the process of
// rank 0, which keeps its file.
std::size_t region_memory(int n) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    struct stat file {};
    if (std::filesystem::read_symlink(entry, gone).string().starts_with("/memfd:weft-region") &&
        ::stat(entry.path().c_str(), &file) == 0 &&
        static_cast<std::size_t>(file.st_size) == shm::Control::bytes(n))
      return static_cast<std::size_t>(file.st_blocks) * 512;
  }
  ADD_FAILURE() << "rank 0 holds no region of " << n << " ranks";
  return 0;
}

// The existing pages of the memory for messages from this rank to rank `to`. None: there is no such memory.
std::optional<std::size_t> pages_of_pair(Rank& r, int to) {
  constexpr std::size_t kPage = 4096;
  const std::vector<SharedMapping> regions = shared_mappings("region");
  if (regions.size() != 1) {
    ADD_FAILURE() << regions.size() << " regions";
    return std::nullopt;
  }
  const shm::Pair* const pair = pair_from_here(r, shm::Control(regions[0].data, r.size), to);
  if (pair == nullptr) return std::nullopt;
  const std::size_t in_page = reinterpret_cast<std::uintptr_t>(pair) % kPage;
  std::vector<unsigned char> there((in_page + sizeof(shm::Pair) + kPage - 1) / kPage);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(pair) - in_page),
                      in_page + sizeof(shm::Pair), there.data()),
            0);
  return std::ranges::count_if(there, [](unsigned char page) { return (page & 1) != 0; });
}

// Each rank sends to the next one, then rank 0 to one more.
void expect_memory_for_used_pairs_only(Rank& r) {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kPair = 9;  // pages of two envelopes and the next one
  const auto n = static_cast<std::size_t>(r.size);
  // Others wait in a barrier while rank 0 counts the pages.
  const auto look = [&] {
    r.group().barrier().wait();
    const std::size_t bytes = r.rank == 0 ? region_memory(r.size) : 0;
    r.group().barrier().wait();
    return bytes;
  };
  const auto expect_pairs = [&](const std::vector<int>& with) {
    for (int to = 0; to < r.size; ++to) {
      const std::optional<std::size_t> pages = pages_of_pair(r, to);
      EXPECT_EQ(pages.has_value(), std::ranges::find(with, to) != with.end()) << "to rank " << to;
      if (pages) {
        EXPECT_THAT(*pages, testing::AllOf(testing::Ge(1u), testing::Le(kPair)));
      }
    }
  };
  const auto exchange = [&](int to, int from) {
    for (const std::int64_t bytes : {std::int64_t{100}, std::int64_t{20000}}) {
      const Tensor out(r.context, Shape{bytes}, DType::u8, Memory::shared);
      const Tensor in(r.context, Shape{bytes}, DType::u8, Memory::shared);
      Work sent = to < 0 ? Work() : r.group().send(out, to);
      if (from >= 0) r.group().recv(in, from).wait();
      if (to >= 0) sent.wait();
    }
  };
  EXPECT_LE(look(), n * (shm::kRing + 4) * kPage);
  for (std::uint64_t k = 0; k < shm::kRing; ++k) r.group().barrier().wait();  // all lines are there
  const std::size_t before = look();
  expect_pairs({});
  const int next = (r.rank + 1) % r.size;
  exchange(next, (r.rank + r.size - 1) % r.size);
  expect_pairs({next});
  exchange(r.rank == 0 ? 2 : -1, r.rank == 2 ? 0 : -1);
  expect_pairs(r.rank == 0 ? std::vector<int>{next, 2} : std::vector<int>{next});
  EXPECT_LE(look() - before, 4 * kPage);  // of the words that say where pairs lie, and others
}

// A huge page would hold pairs that have hardly sent.
TEST(ShmControl, PairsOfThreadsTakeNoHugePages) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    const Tensor x = Tensor::zeros(r.context, Shape{1}, DType::u8);
    r.group().send(x, 1 - r.rank).wait();
    r.group().recv(x, 1 - r.rank).wait();
    const auto at = reinterpret_cast<std::uintptr_t>(
        pair_from_here(r, shm::Control(shared_mappings("region").at(0).data, 2), 1 - r.rank));
    bool here = false, small = false;
    FileIn smaps("/proc/self/smaps");
    for (std::string line; std::getline(smaps, line);) {
      std::uintptr_t begin = 0, end = 0;
      if (std::sscanf(line.c_str(), "%zx-%zx ", &begin, &end) == 2) here = begin <= at && at < end;
      if (here && line.starts_with("VmFlags:")) small = line.find(" nh") != std::string::npos;
    }
    EXPECT_TRUE(small);
    r.meet("looked");
  });
}

constexpr int kManyPairs = 16;  // ranks: few of their pairs send

TEST(ShmControl, OnlyPairsOfThreadsThatSendTakeMemory) {
  run_ranks(Ranks::threads, kManyPairs, expect_memory_for_used_pairs_only);
}

TEST(ShmControl, OnlyPairsOfProcessesThatSendTakeMemory) {
  if (!kProcesses) GTEST_SKIP() << "no processes under this sanitizer";
  run_ranks(Ranks::processes, kManyPairs, expect_memory_for_used_pairs_only);
}

// In a process of one thread, makes it see a machine with four memory nodes. Returns false if the system does
// not permit that.
bool pretend_memory_nodes(const std::string& folder) {
  const std::string list = folder + "/online";
  std::ofstream(list) << "0-3\n";
  return (::unshare(CLONE_NEWNS) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount(list.c_str(), "/sys/devices/system/node/online", nullptr, MS_BIND, nullptr) == 0;
}

TEST(MemoryNodes, OfSeveralAGroupTakesMemoryForPairsThatSendOnly) {
  if (!kProcesses) GTEST_SKIP() << "no processes under this sanitizer";
  const TemporaryFolder folder;
  for (const Ranks kind : {Ranks::threads, Ranks::processes}) {
    const ProcessResult result = run_in_child([&] {
      if (!pretend_memory_nodes(folder.path().string())) return 2;
      EXPECT_EQ(memory_nodes(), 4);
      run_ranks(kind, kManyPairs, expect_memory_for_used_pairs_only);
      return 0;
    });
    if (result.status.code == 2) GTEST_SKIP() << "mount namespaces are not permitted";
    EXPECT_TRUE(result.ok()) << to_string(kind) << ": " << to_string(result);
  }
}

TEST(MemoryNodes, AreCountedAsTheKernelListsThem) {
  EXPECT_EQ(count_listed("0"), 1);
  EXPECT_EQ(count_listed("0-1"), 2);
  EXPECT_EQ(count_listed("0-3,8,10-11"), 7);
  EXPECT_EQ(count_listed(""), 0);
  EXPECT_GE(memory_nodes(), 1);
}

TEST(UsableCores, OfRanksThatAreBoundApartAreAllOfThem) {
  EXPECT_EQ(CoreSet().encode(), "0");
  EXPECT_EQ(CoreSet::decode("0").count(), 0);
  const CoreSet usable = CoreSet::usable();
  EXPECT_GE(usable.count(), 1);
  EXPECT_EQ(usable.count(), usable_cores());
  EXPECT_EQ(CoreSet::decode(usable.encode()).encode(), usable.encode());
  CoreSet both = CoreSet::decode("1");  // core 0
  both |= CoreSet::decode("08");        // core 7
  EXPECT_EQ(both.encode(), "18");
  EXPECT_EQ(both.count(), 2);
  both |= CoreSet::decode("1");
  EXPECT_EQ(both.count(), 2);
  EXPECT_EQ(CoreSet::decode(std::string(2000, 'f')).count(), CPU_SETSIZE);
  EXPECT_EQ(CoreSet::decode("x4 ?!").encode(), "04");
}

// Each half of the text names the call of a rank. The rank that did not detect the mismatch is first.
void expect_mismatch(int n, const std::function<void(Rank&)>& call, const std::vector<std::string>& parts) {
  run_ranks(kProcesses ? Ranks::processes : Ranks::threads, n, [&](Rank& r) {
    const Error e = error_of([&] {
      call(r);
      r.group().barrier().wait();  // the root of a scatter learns of it at its next call
    });
    EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
    for (const std::string& part : parts) EXPECT_THAT(e.what(), HasSubstr(part));
    EXPECT_THAT(e.what(), HasSubstr("[group \"world\", rank " + std::to_string(r.rank) + ", call 0]"));
    EXPECT_EQ(e.call(), 0u);
    EXPECT_EQ(e.ranks().size(), 2u);
  });
}

// Small and large: what is compared does not depend on the path.
TEST(ShmMismatch, Roots) {
  for (const std::int64_t count : {std::int64_t{3}, std::int64_t{5000}}) {
    const std::string x = std::to_string(count);
    const auto tensor = [](Rank& r, std::int64_t c) { return Tensor(r.context, Shape{c}, DType::f32); };
    expect_mismatch(2,
                    [&](Rank& r) { r.group().gather(tensor(r, count), tensor(r, 2 * count), r.rank).wait(); },
                    {"gather f32 x" + x + " root 0 [call 0]", "gather f32 x" + x + " root 1 [call 0]"});
    expect_mismatch(
        2, [&](Rank& r) { r.group().scatter(tensor(r, 2 * count), tensor(r, count), r.rank).wait(); },
        {"scatter f32 x" + x + " root 0 [call 0]", "scatter f32 x" + x + " root 1 [call 0]"});
    expect_mismatch(
        2, [&](Rank& r) { r.group().reduce(tensor(r, count), tensor(r, count), r.rank).wait(); },
        {"reduce f32 x" + x + " sum root 0 [call 0]", "reduce f32 x" + x + " sum root 1 [call 0]"});
  }
}

TEST(ShmMismatch, Counts) {
  const auto tensor = [](Rank& r, std::int64_t c) { return Tensor(r.context, Shape{c}, DType::i32); };
  for (const std::int64_t scale : {std::int64_t{1}, std::int64_t{2000}}) {
    const std::string x = "x" + std::to_string(scale), y = "x" + std::to_string(2 * scale);
    expect_mismatch(2,
                    [&](Rank& r) {
                      const std::int64_t c = scale * (r.rank + 1);
                      r.group().gather(tensor(r, c), tensor(r, 2 * c), 0).wait();
                    },
                    {"gather i32 " + x + " root 0", "gather i32 " + y + " root 0"});
    expect_mismatch(2,
                    [&](Rank& r) {
                      const std::int64_t c = scale * (r.rank + 1);
                      r.group().scatter(tensor(r, 2 * c), tensor(r, c), 1).wait();
                    },
                    {"scatter i32 " + x + " root 1", "scatter i32 " + y + " root 1"});
    expect_mismatch(
        2,
        [&](Rank& r) {
          const std::int64_t c = scale * (r.rank + 1);
          r.group().all_to_all(tensor(r, 2 * c), tensor(r, 2 * c)).wait();
        },
        {"all_to_all i32 " + y + " [call 0]", "all_to_all i32 x" + std::to_string(4 * scale) + " [call 0]"});
  }
}

// The whole vector is compared, even if this rank's own block and the sum are equal.
TEST(ShmMismatch, CountVectors) {
  const auto tensor = [](Rank& r, std::int64_t c) { return Tensor(r.context, Shape{c}, DType::f32); };
  for (const std::int64_t scale : {std::int64_t{1}, std::int64_t{3000}}) {
    const std::string x = "x" + std::to_string(10 * scale), five = std::to_string(5 * scale),
                      four = std::to_string(4 * scale);
    const std::vector<std::int64_t> right{2 * scale, 5 * scale, 3 * scale},
        wrong{2 * scale, 4 * scale, 4 * scale};
    expect_mismatch(3,
                    [&](Rank& r) {
                      const auto& counts = r.rank == 0 ? wrong : right;
                      const std::int64_t own = counts[static_cast<std::size_t>(r.rank)];
                      r.group().all_gather_v(tensor(r, own), tensor(r, 10 * scale), {counts}).wait();
                    },
                    {"all_gather_v f32 " + x + " with counts[1] = " + five,
                     "all_gather_v f32 " + x + " with counts[1] = " + four});
    expect_mismatch(3,
                    [&](Rank& r) {
                      const auto& counts = r.rank == 0 ? wrong : right;
                      const std::int64_t own = counts[static_cast<std::size_t>(r.rank)];
                      r.group()
                          .reduce_scatter_v(tensor(r, 10 * scale), tensor(r, own), {counts},
                                            {.op = ReduceOp::max})
                          .wait();
                    },
                    {"reduce_scatter_v f32 " + x + " with counts[1] = " + five + " max",
                     "reduce_scatter_v f32 " + x + " with counts[1] = " + four + " max"});
    expect_mismatch(
        3,
        [&](Rank& r) {
          std::vector<std::int64_t> send(3, scale), recv(3, scale);
          if (r.rank == 1) send[0] = 5 * scale;
          if (r.rank == 0) recv[1] = 7 * scale;
          r.group().all_to_all_v(tensor(r, 10 * scale), tensor(r, 10 * scale), {send}, {recv}).wait();
        },
        {"all_to_all_v: rank 1 sends " + five + " elements to rank 0, which expects " +
         std::to_string(7 * scale)});
  }
}

TEST(ShmMismatch, Reductions) {
  const auto tensor = [](Rank& r, std::int64_t c) { return Tensor(r.context, Shape{c}, DType::f32); };
  const auto left = [](const void* a, const void*, void* out, std::int64_t count, DType t) {
    if (out != a) std::memcpy(out, a, static_cast<std::size_t>(count * size_bytes(t)));
  };
  const UserReduction first{"first", left}, foremost{"foremost", left};
  for (const std::int64_t count : {std::int64_t{3}, std::int64_t{5000}}) {
    const std::string x = "all_reduce f32 x" + std::to_string(count) + " ";
    const auto differ = [&](ReduceOp zero, ReduceOp one, const std::string& zero_text,
                            const std::string& one_text) {
      expect_mismatch(2,
                      [&](Rank& r) {
                        const Tensor t = tensor(r, count);
                        r.group().all_reduce(t, t, {.op = r.rank == 0 ? zero : one}).wait();
                      },
                      {x + zero_text + " [call 0]", x + one_text + " [call 0]"});
    };
    differ(ReduceOp::premul_sum(0.5), ReduceOp::premul_sum(0.25), "premul_sum(0.5)", "premul_sum(0.25)");
    differ(ReduceOp::of(first), ReduceOp::of(foremost), "user \"first\"", "user \"foremost\"");
    differ(ReduceOp::sum, ReduceOp::of(first), "sum", "user \"first\"");
  }
}

// The scale and the name are compared; the function is not, because each rank has its own.
TEST_P(Shm, ScalesAndUserReductions) {
  run(3, [](Rank& r) {
    // An element is an affine map x -> a x + b, packed as (a, b); the reduction composes two maps.
    // Associative, and the order of the ranks matters.
    const auto packed = [](std::uint64_t a, std::uint64_t b) { return a << 32 | b; };
    const UserReduction compose{
        "compose", [&](const void* l, const void* r2, void* out, std::int64_t n, DType) {
          const auto *p = static_cast<const std::uint64_t*>(l), *q = static_cast<const std::uint64_t*>(r2);
          for (std::int64_t i = 0; i < n; ++i)
            static_cast<std::uint64_t*>(out)[i] = packed(
                (p[i] >> 32) * (q[i] >> 32), (p[i] >> 32) * (q[i] & 0xffffffffu) + (p[i] & 0xffffffffu));
        }};
    const auto map = [&](int rank, std::int64_t i) {
      return std::pair(static_cast<std::uint64_t>(value(rank, i)),
                       static_cast<std::uint64_t>(value(rank, i + 1)));
    };
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{97}, std::int64_t{60000}}) {
      const Tensor maps = buffer(r, count, DType::u64);
      for (std::int64_t i = 0; i < count; ++i) {
        const auto [a, b] = map(r.rank, i);
        store(maps, i, static_cast<double>(packed(a, b)));
      }
      r.group().all_reduce(maps, maps, {.op = ReduceOp::of(compose)}).wait();
      for (std::int64_t i = 0; i < count; ++i) {
        const auto [a0, b0] = map(0, i);
        const auto [a1, b1] = map(1, i);
        const auto [a2, b2] = map(2, i);
        ASSERT_EQ(load(maps, i), static_cast<double>(packed(a0 * a1 * a2, a0 * (a1 * b2 + b1) + b0))) << i;
      }
      const Tensor scaled = buffer(r, count);
      r.group().reduce(scaled, scaled, 1, {.op = ReduceOp::premul_sum(0.5)}).wait();
      for (std::int64_t i = 0; i < count; ++i)
        ASSERT_EQ(load(scaled, i),
                  r.rank == 1 ? combined(ReduceOp::sum, DType::f32, 3, i) / 2 : value(r.rank, i));
    }
  });
}

// Shared memory is read and written directly; other memory never is.
TEST_P(Shm, TheDirectPathIsTakenForSharedMemoryAlone) {
  run(3, [](Rank& r) {
    RankOptions watched = r.options;
    int in_place = 0;
    watched.hooks.in_chunk = [&](std::uint64_t) { ++in_place; };
    Rank me(r.rank, r.size, r.context, r.store, watched);
    const bool direct = GetParam().kind == Ranks::threads || GetParam().memory == Memory::shared;
    const std::int64_t each = 3001;
    const Tensor one = buffer(r, each), all = buffer(r, 3 * each), other = buffer(r, 3 * each);
    const std::vector<std::int64_t> counts(3, each);
    ProcessGroup& g = me.group();
    g.barrier().wait();
    const std::pair<const char*, std::function<Work()>> calls[] = {
        {"reduce", [&] { return g.reduce(all, other, 1); }},
        {"gather", [&] { return g.gather(one, all, 1); }},
        {"scatter", [&] { return g.scatter(all, one, 1); }},
        {"all_gather_v", [&] { return g.all_gather_v(one, all, {counts}); }},
        {"reduce_scatter_v", [&] { return g.reduce_scatter_v(all, one, {counts}); }},
        {"all_to_all", [&] { return g.all_to_all(all, other); }},
        {"all_to_all_v", [&] { return g.all_to_all_v(all, other, {counts}, {counts}); }},
    };
    for (const auto& [what, call] : calls) {
      in_place = 0;
      call().wait();
      EXPECT_EQ(in_place > 0, direct) << what;
    }
  });
}

}  // namespace
}  // namespace weft::test::shm_ops_test
