// Copies of runs and of boxes, whole and in parts, compared element by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "host/strided/loops.hpp"
#include "host/strided/runs.hpp"
#include "weft/host/context.hpp"

namespace weft::test::strided_test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes numbered(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

TEST(CopyRuns, CopiesRunsOfEachLengthAndNothingElse) {
  for (std::int64_t run = 1; run <= 300; ++run)
    for (const std::int64_t count : {1, 2, 3, 4, 5, 9})
      for (const std::int64_t gap : {0, 1, 37}) {
        const std::int64_t wide = run + gap;
        const Bytes in = numbered(static_cast<std::size_t>(wide * count), 1);
        const Bytes before = numbered(in.size(), 2);
        for (const bool in_gaps : {false, true}) {
          Bytes out = before, expected = before;
          const std::int64_t in_step = in_gaps ? wide : run, out_step = in_gaps ? run : wide;
          for (std::int64_t i = 0; i < count; ++i)
            for (std::int64_t b = 0; b < run; ++b)
              expected[static_cast<std::size_t>(i * out_step + b)] =
                  in[static_cast<std::size_t>(i * in_step + b)];
          copy_runs_of(run)(in.data(), out.data(), count, in_step, out_step, run);
          ASSERT_EQ(out, expected) << run << " bytes, " << count << " runs, gap " << gap;
        }
      }
}

TEST(CopyRuns, StepsBackwardsAndStaysInPlace) {
  for (const std::int64_t run : {1, 2, 3, 4, 7, 8, 12, 16, 30, 64, 100, 200}) {
    constexpr std::int64_t kCount = 7;
    const Bytes in = numbered(static_cast<std::size_t>(kCount * run), 3);
    Bytes out(in.size()), expected(in.size());
    for (std::int64_t i = 0; i < kCount; ++i)
      std::copy_n(in.begin() + (kCount - 1 - i) * run, run, expected.begin() + i * run);
    copy_runs_of(run)(in.data() + (kCount - 1) * run, out.data(), kCount, -run, run, run);
    EXPECT_EQ(out, expected) << run;
    for (std::int64_t i = 0; i < kCount; ++i) std::copy_n(in.begin(), run, expected.begin() + i * run);
    copy_runs_of(run)(in.data(), out.data(), kCount, 0, run, run);
    EXPECT_EQ(out, expected) << run;
  }
}

// A box of a larger array: for each dimension the elements of the box, and those of the array. Lists: places
// in the array, and in the packed elements, of the indices of the first dimension. Empty: the indices
// themselves.
struct BoxOf {
  std::vector<std::int64_t> counts, extents, list{}, packed_list{};
  std::int64_t offset_of(std::int64_t element, bool packed, std::int64_t size) const {
    std::int64_t offset = 0, step = size;
    for (std::size_t d = counts.size(); d-- > 0;) {
      const auto index = static_cast<std::size_t>(element % counts[d]);
      const auto& places = packed ? packed_list : list;
      offset += (d == 0 && !places.empty() ? places[index] : static_cast<std::int64_t>(index)) * step;
      element /= counts[d];
      step *= packed ? counts[d] : extents[d];
    }
    return offset;
  }
  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const std::int64_t c : counts) n *= c;
    return n;
  }
  Loops loops(std::int64_t size, bool packs) const {
    std::vector<std::int64_t> here(counts.size()), packed(counts.size());
    std::int64_t a = size, b = size;
    for (std::size_t d = counts.size(); d-- > 0;) {
      here[d] = a, packed[d] = b;
      a *= extents[d], b *= counts[d];
    }
    Loops loops(static_cast<std::size_t>(size));
    const auto& in_list = packs ? list : packed_list;
    const auto& out_list = packs ? packed_list : list;
    loops.add_list(counts[0], in_list.empty() ? nullptr : in_list.data(), packs ? here[0] : packed[0],
                   out_list.empty() ? nullptr : out_list.data(), packs ? packed[0] : here[0]);
    for (std::size_t d = 1; d < counts.size(); ++d)
      loops.add(counts[d], packs ? here[d] : packed[d], packs ? packed[d] : here[d]);
    return loops;
  }
};

TEST(Loops, CopyABoxWholeAndInParts) {
  Context context;
  DeviceRuntime& runtime = context.device(Device{});
  std::mt19937 random(7);
  const auto up_to = [&](std::int64_t most) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(most)) + 1;
  };
  for (int round = 0; round < 600; ++round) {
    BoxOf box;
    std::int64_t held = 1;
    for (std::int64_t rank = up_to(4), d = 0; d < rank; ++d) {
      box.counts.push_back(up_to(6));
      box.extents.push_back(box.counts.back() + (random() % 2 == 0 ? 0 : up_to(3)));
      held *= box.extents.back();
    }
    for (auto* places : {&box.list, &box.packed_list}) {
      if (random() % 2 == 0) continue;
      places->resize(static_cast<std::size_t>(places == &box.list ? box.extents[0] : box.counts[0]));
      std::iota(places->begin(), places->end(), 0);
      std::shuffle(places->begin(), places->end(), random);
      places->resize(static_cast<std::size_t>(box.counts[0]));
    }
    const std::int64_t size = std::int64_t{1} << (round % 5), n = box.elements();
    const bool packs = round % 2 == 0;
    const Loops loops = box.loops(size, packs);
    const Bytes in = numbered(static_cast<std::size_t>((packs ? held : n) * size), 11);
    const Bytes before = numbered(static_cast<std::size_t>((packs ? n : held) * size), 12);
    const auto expected = [&](std::int64_t first, std::int64_t count) {
      Bytes out = before;
      for (std::int64_t e = first; e < first + count; ++e)
        std::memcpy(out.data() + box.offset_of(e, packs, size), in.data() + box.offset_of(e, !packs, size),
                    static_cast<std::size_t>(size));
      return out;
    };
    Bytes out = before;
    loops.copy(runtime, {}, in.data(), out.data());
    ASSERT_EQ(out, expected(0, n));
    for (int part = 0; part < 8; ++part) {
      const std::int64_t first = up_to(n) - 1, count = up_to(n - first);
      out = before;
      loops.copy_some(first, count, in.data(), out.data());
      ASSERT_EQ(out, expected(first, count)) << first << " and " << count << " of " << n;
    }
  }
}

TEST(Loops, OfNothingCopyNothing) {
  Context context;
  Loops loops(4);
  loops.add(3, 4, 4);
  loops.add(0, 4, 4);
  const Bytes in = numbered(12, 5), before = numbered(12, 6);
  Bytes out = before;
  loops.copy(context.device(Device{}), {}, in.data(), out.data());
  loops.copy_some(0, 3, in.data(), out.data());
  EXPECT_EQ(out, before);
}

}  // namespace
}  // namespace weft::test::strided_test
