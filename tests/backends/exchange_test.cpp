// Neighbourhood exchanges over every backend: random plans, compared element by element; the order of sums;
// several exchanges in flight; plans that are destroyed during an exchange; ranks with different plans, or
// absent ranks; and refused arguments. Under mpirun over the MPI that WEFT_TEST_BACKEND names.
#include "weft/group/persistent_exchange.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "host/arena.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/transport_setting.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::exchange_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class Exchanges : public testing::TestWithParam<TransportSetting> {
 protected:
  void run(int n, const std::function<void(Rank&)>& body, Duration deadline = 20s) {
    RankOptions options;
    options.backend = GetParam().backend;
    options.deadline = deadline;
    run_ranks(GetParam().kind, GetParam().kind == Ranks::job ? job_size() : n, body, options);
  }
  bool in_job() const { return GetParam().kind == Ranks::job; }
};
INSTANTIATE_TEST_SUITE_P(Each, Exchanges, testing::ValuesIn(transport_settings()), [](const auto& p) {
  return p.param.kind == Ranks::job ? "job" : p.param.backend + "_" + to_string(p.param.kind);
});

// Calls see(offset in elements) for each element of a box, row-major.
template <class See>
void each_element(const ExchangeBox& b, const See& see) {
  if (b.counts.count() == 0) return;
  std::vector<std::int64_t> index(static_cast<std::size_t>(b.counts.rank()));
  for (;;) {
    std::int64_t at = b.offset;
    for (int d = 0; d < b.counts.rank(); ++d) {
      const auto i = index[static_cast<std::size_t>(d)];
      at += (d == 0 && !b.indices.empty() ? b.indices[static_cast<std::size_t>(i)] : i) * b.strides[d];
    }
    see(at);
    int d = b.counts.rank() - 1;
    for (; d >= 0; --d) {
      auto& i = index[static_cast<std::size_t>(d)];
      if (++i < b.counts[d]) break;
      i = 0;
    }
    if (d < 0) return;
  }
}

// The plans of all ranks; every rank draws the same plans.
struct Job {
  static constexpr std::int64_t kRoom = 30'000;  // elements of a field
  int ranks;
  std::vector<ExchangePlan> plans;  // of each rank

  Job(unsigned seed, int n, ExchangePlan::Kind kind, const std::vector<DType>& dtypes) : ranks(n) {
    std::mt19937_64 random(seed);
    const auto below = [&](std::int64_t k) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(k));
    };
    ExchangePlan empty;
    empty.kind = kind;
    const std::int64_t fields = 1 + below(3);
    for (std::int64_t f = 0; f < fields; ++f)
      empty.fields.push_back(
          dtypes[static_cast<std::size_t>(below(static_cast<std::int64_t>(dtypes.size())))]);
    plans.assign(static_cast<std::size_t>(n), empty);
    // Where the next box that is received may lie, of each rank and field.
    std::vector<std::vector<std::int64_t>> next(static_cast<std::size_t>(n),
                                                std::vector<std::int64_t>(static_cast<std::size_t>(fields)));
    for (int p = 0; p < n; ++p)
      for (int q = 0; q < n; ++q) {
        if (below(3) == 0) continue;
        ExchangePart sends{q}, receives{p};
        const std::int64_t boxes = below(4);
        for (std::int64_t i = 0; i < boxes; ++i) {
          const auto f = static_cast<int>(below(fields));
          Shape counts;
          const std::int64_t rank = below(4);
          const bool large = below(12) == 0;
          for (std::int64_t d = 0; d < rank; ++d) counts.push_back(large ? 1 + below(20) : below(6));
          const bool adds = kind == ExchangePlan::Kind::add;
          sends.boxes.push_back(place(
              counts, f, true, [&](std::int64_t span) { return below(kRoom - span + 1); }, below));
          receives.boxes.push_back(place(
              counts, f, adds,
              [&](std::int64_t span) {
                std::int64_t& at = next[static_cast<std::size_t>(q)][static_cast<std::size_t>(f)];
                if (kind == ExchangePlan::Kind::add && below(2) == 0)
                  return below(std::max<std::int64_t>(at, 1));
                at += span;
                return at - span;
              },
              below));
        }
        plans[static_cast<std::size_t>(p)].sends.push_back(sends);
        plans[static_cast<std::size_t>(q)].receives.push_back(receives);
      }
    for (ExchangePlan& plan : plans) std::shuffle(plan.receives.begin(), plan.receives.end(), random);
  }

  // A box of these counts with gaps, some dimensions backwards, some with indices, in a span of elements that
  // begins where `begin` says. `repeats`: an index may be there several times.
  template <class Begin, class Below>
  static ExchangeBox place(const Shape& counts, int field, bool repeats, const Begin& begin,
                           const Below& below) {
    ExchangeBox b{field, 0, counts, {}};
    std::vector<std::int64_t> strides(static_cast<std::size_t>(counts.rank()));
    std::int64_t step = 1 + below(2), span = 1;
    for (int d = counts.rank() - 1; d >= 0; --d) {
      strides[static_cast<std::size_t>(d)] = step;
      span += std::max<std::int64_t>(counts[d] - 1, 0) * step;
      step *= std::max<std::int64_t>(counts[d], 1);
      if (below(4) == 0) step += 1;
    }
    const bool listed = counts.rank() > 0 && counts.count() > 0 && below(2) == 0;
    if (listed) {  // numbers up to twice as many as needed, in a random order
      const std::int64_t most = counts[0] + (span < 1000 ? below(counts[0] + 1) : 0);
      span += (most - counts[0]) * strides[0];
      std::vector<std::int64_t> all(static_cast<std::size_t>(most));
      std::iota(all.begin(), all.end(), 0);
      for (std::int64_t i = 0; i < counts[0]; ++i)
        std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(i + below(most - i))]);
      all.resize(static_cast<std::size_t>(counts[0]));
      if (repeats && below(2) == 0) all.back() = all.front();
      if (below(8) == 0) std::sort(all.begin(), all.end());
      b.indices = all;
    }
    b.offset = begin(span);
    for (int d = 0; d < counts.rank(); ++d) {
      const std::int64_t s = strides[static_cast<std::size_t>(d)];
      const bool back = below(4) == 0 && !(listed && d == 0);
      if (back) b.offset += std::max<std::int64_t>(counts[d] - 1, 0) * s;
      b.strides.push_back(back ? -s : s);
    }
    return b;
  }
};

// Fields of a rank: bytes, each element a number of its own.
struct Memory {
  std::vector<std::vector<std::byte>> in, out;
  explicit Memory(const ExchangePlan& plan) {
    for (const DType t : plan.fields) {
      in.emplace_back(static_cast<std::size_t>(Job::kRoom * size_bytes(t)));
      out.emplace_back(in.back().size());
    }
  }
  std::vector<ExchangeField> fields() {
    std::vector<ExchangeField> all;
    for (std::size_t f = 0; f < in.size(); ++f) all.push_back({in[f].data(), out[f].data()});
    return all;
  }
};

template <class T>
void put(std::vector<std::byte>& bytes, std::int64_t at, T value) {
  std::memcpy(bytes.data() + at * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}
template <class T>
T get(const std::vector<std::byte>& bytes, std::int64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

std::byte sent_byte(int rank, std::size_t field, std::int64_t at, int round) {
  return static_cast<std::byte>(
      (rank * 131 + static_cast<int>(field) * 37 + static_cast<int>(at % 9973) * 7 + round) % 251);
}

void fill(Memory& m, int rank, int round) {
  for (std::size_t f = 0; f < m.in.size(); ++f)
    for (std::size_t i = 0; i < m.in[f].size(); ++i)
      m.in[f][i] = sent_byte(rank, f, static_cast<std::int64_t>(i), round);
  for (auto& out : m.out) std::fill(out.begin(), out.end(), std::byte{0xee});
}

// The memory of rank `r` after a plan of kind copy.
std::vector<std::vector<std::byte>> copied(const Job& job, int r, int round) {
  const ExchangePlan& plan = job.plans[static_cast<std::size_t>(r)];
  Memory m(plan);
  fill(m, r, round);
  for (const ExchangePart& part : plan.receives) {
    const ExchangePlan& theirs = job.plans[static_cast<std::size_t>(part.peer)];
    const auto sent =
        std::find_if(theirs.sends.begin(), theirs.sends.end(), [&](const auto& p) { return p.peer == r; });
    for (std::size_t b = 0; b < part.boxes.size(); ++b) {
      const auto f = static_cast<std::size_t>(part.boxes[b].field);
      const std::int64_t element = size_bytes(plan.fields[f]);
      std::vector<std::int64_t> from;
      each_element(sent->boxes[b], [&](std::int64_t at) { from.push_back(at); });
      std::size_t i = 0;
      each_element(part.boxes[b], [&](std::int64_t at) {
        for (std::int64_t k = 0; k < element; ++k)
          m.out[f][static_cast<std::size_t>(at * element + k)] =
              sent_byte(part.peer, f, from[i] * element + k, round);
        ++i;
      });
    }
  }
  return m.out;
}

constexpr int kPlans = 20;

TEST_P(Exchanges, CopyWhatThePlanSays) {
  run(4, [&](Rank& r) {
    for (unsigned seed = 0; seed < kPlans; ++seed) {
      SCOPED_TRACE(seed);
      const Job job(seed, r.size, ExchangePlan::Kind::copy,
                    {DType::u8, DType::f32, DType::f64, DType::c128, DType::f8e4m3});
      const ExchangePlan& plan = job.plans[static_cast<std::size_t>(r.rank)];
      PersistentExchange x = r.group().make_exchange(plan);
      for (int round = 0; round < 3; ++round) {
        Memory m(plan);
        fill(m, r.rank, round);
        x.start(m.fields()).wait();
        ASSERT_EQ(m.out, copied(job, r.rank, round));
      }
      Memory once(plan);
      fill(once, r.rank, 3);
      r.group().exchange(plan, once.fields()).wait();
      ASSERT_EQ(once.out, copied(job, r.rank, 3));
    }
  });
}

TEST_P(Exchanges, SeveralFlySideBySideAndOutliveTheirPlan) {
  run(4, [&](Rank& r) {
    const Job job(7, r.size, ExchangePlan::Kind::copy, {DType::f32, DType::u8});
    const ExchangePlan& plan = job.plans[static_cast<std::size_t>(r.rank)];
    PersistentExchange x = r.group().make_exchange(plan);
    std::vector<Memory> memory;
    std::vector<Work> works;
    for (int i = 0; i < 10; ++i) memory.emplace_back(plan);
    for (int i = 0; i < 10; ++i) {
      fill(memory[static_cast<std::size_t>(i)], r.rank, i);
      works.push_back(x.start(memory[static_cast<std::size_t>(i)].fields()));
    }
    x = {};
    std::vector<float> sum(100, 1);
    Work other = r.group().all_reduce(view(sum));
    for (int i = 9; i >= 0; --i) {
      works[static_cast<std::size_t>(i)].wait();
      ASSERT_EQ(memory[static_cast<std::size_t>(i)].out, copied(job, r.rank, i));
    }
    other.wait();
    EXPECT_EQ(sum[99], static_cast<float>(r.size));
    EXPECT_THAT(r.group().trace_json(), HasSubstr("\"exchange\""));
    const PersistentExchange another = r.group().make_exchange(plan);  // those that ended are dropped
    EXPECT_TRUE(another);
  });
}

// Sums of one element after the other, in the order of the ranks, as a plan of kind add says.
template <class T, class Sum>
std::vector<std::vector<std::byte>> added(const Job& job, int r,
                                          const std::function<T(int, std::int64_t)>& value) {
  const ExchangePlan& plan = job.plans[static_cast<std::size_t>(r)];
  Memory m(plan);
  std::vector<std::vector<Sum>> sums(plan.fields.size(), std::vector<Sum>(Job::kRoom));
  for (auto& s : sums)
    for (std::int64_t i = 0; i < Job::kRoom; ++i)
      s[static_cast<std::size_t>(i)] = static_cast<Sum>(value(-1, i));
  for (int p = 0; p < job.ranks; ++p)
    for (const ExchangePart& part : plan.receives) {
      if (part.peer != p) continue;
      const ExchangePlan& theirs = job.plans[static_cast<std::size_t>(p)];
      const auto sent =
          std::find_if(theirs.sends.begin(), theirs.sends.end(), [&](const auto& q) { return q.peer == r; });
      for (std::size_t b = 0; b < part.boxes.size(); ++b) {
        std::vector<std::int64_t> from;
        each_element(sent->boxes[b], [&](std::int64_t at) { from.push_back(at); });
        std::size_t i = 0;
        each_element(part.boxes[b], [&](std::int64_t at) {
          Sum& sum = sums[static_cast<std::size_t>(part.boxes[b].field)][static_cast<std::size_t>(at)];
          sum = static_cast<Sum>(sum + static_cast<Sum>(value(p, from[i++])));
        });
      }
    }
  for (std::size_t f = 0; f < sums.size(); ++f)
    for (std::int64_t i = 0; i < Job::kRoom; ++i)
      put(m.out[f], i, static_cast<T>(sums[f][static_cast<std::size_t>(i)]));
  return m.out;
}

template <class T, class Sum>
void expect_sums(Rank& r, unsigned seed, DType dtype, const std::function<T(int, std::int64_t)>& value) {
  SCOPED_TRACE(std::string(name(dtype)) + ", seed " + std::to_string(seed));
  const Job job(seed, r.size, ExchangePlan::Kind::add, {dtype});
  const ExchangePlan& plan = job.plans[static_cast<std::size_t>(r.rank)];
  PersistentExchange x = r.group().make_exchange(plan);
  for (int round = 0; round < 2; ++round) {
    Memory m(plan);
    for (std::size_t f = 0; f < m.in.size(); ++f)
      for (std::int64_t i = 0; i < Job::kRoom; ++i) {
        put(m.in[f], i, value(r.rank, i));
        put(m.out[f], i, value(-1, i));
      }
    x.start(m.fields()).wait();
    ASSERT_TRUE(m.out == (added<T, Sum>(job, r.rank, value)));
  }
}

TEST_P(Exchanges, AddInTheOrderOfTheRanksAndRoundOnce) {
  run(4, [&](Rank& r) {
    for (unsigned seed = 100; seed < 104; ++seed) {
      const auto number = [](int rank, std::int64_t i) {
        return (static_cast<double>((i * 7919 + rank * 104729) % 20011) - 10000) / 3;
      };
      expect_sums<float, float>(r, seed, DType::f32,
                                [&](int p, std::int64_t i) { return static_cast<float>(number(p, i)); });
      expect_sums<double, double>(r, seed, DType::f64, number);
      expect_sums<bf16, float>(r, seed, DType::bf16,
                               [&](int p, std::int64_t i) { return bf16(static_cast<float>(number(p, i))); });
      expect_sums<f16, float>(r, seed, DType::f16, [&](int p, std::int64_t i) {
        return f16(static_cast<float>(number(p, i) / 100));
      });
      expect_sums<std::uint8_t, std::uint8_t>(r, seed, DType::u8, [](int p, std::int64_t i) {
        return static_cast<std::uint8_t>(i * 5 + p * 91);
      });
    }
  });
}

// Rings: each rank sends the end of its row to the next one.
struct Ring {
  Ring(const Rank& r, std::int64_t count, DType dtype = DType::f32) {
    plan.fields = {dtype};
    plan.sends = {{(r.rank + 1) % r.size, {{0, 0, {count}, {1}}}}};
    plan.receives = {{(r.rank + r.size - 1) % r.size, {{0, 0, {count}, {1}}}}};
  }
  ExchangePlan plan;
};

TEST_P(Exchanges, ManyBytesGoFromWhereTheyLie) {
  run(3, [&](Rank& r) {
    constexpr std::int64_t kMany = 3'000'001;
    const Ring ring(r, kMany);
    std::vector<float> in(kMany), out(kMany);
    std::iota(in.begin(), in.end(), static_cast<float>(r.rank));
    const ExchangeField field{in.data(), out.data()};
    r.group().exchange(ring.plan, {&field, 1}).wait();
    const int from = (r.rank + r.size - 1) % r.size;
    for (std::int64_t i = 0; i < kMany; i += 997)
      ASSERT_EQ(out[static_cast<std::size_t>(i)],
                in[static_cast<std::size_t>(i)] - static_cast<float>(r.rank) + static_cast<float>(from));
  });
}

// Rank 0 adds the parts of ranks 1 and 2. Rank 1 waits until its part is taken before it sends to rank 2, and
// rank 2 waits for that before it sends its part. So rank 0 takes rank 1's part before it can add both.
TEST_P(Exchanges, APartIsTakenBeforeThoseOfOtherRanksCome) {
  for (const weft::Memory memory : {weft::Memory::local, weft::Memory::shared})
    for (const std::int64_t count : {5, 3000, 300'000})
      run(
          3,
          [&](Rank& r) {
            if (r.rank > 2 || r.size < 3) return;
            ExchangePlan sum, copy;
            sum.kind = ExchangePlan::Kind::add;
            sum.fields = copy.fields = {DType::f32};
            // Every second element is sent, in reverse order.
            const ExchangeBox sent{0, 2 * (count - 1), {count}, {-2}}, first{0, 0, {count}, {1}},
                second{0, count / 2, {count}, {1}};
            if (r.rank == 0) sum.receives = {{1, {first}}, {2, {second}}};
            if (r.rank != 0) sum.sends = {{0, {sent}}};
            if (r.rank == 1) copy.sends = {{2, {sent}}};
            if (r.rank == 2) copy.receives = {{1, {first}}};
            Tensor in = Tensor::zeros(r.context, Shape{2 * count}, DType::f32, memory),
                   out = in.clone(r.context);
            for (std::int64_t i = 0; i < 2 * count; ++i)
              in.f32()[static_cast<std::size_t>(i)] = static_cast<float>(i % 1000 + r.rank);
            const ExchangeField field{in.data(), out.data()};
            const auto exchange = [&](const ExchangePlan& plan) {
              r.group().exchange(plan, {&field, 1}).wait();
            };
            if (r.rank != 2) exchange(sum);
            if (r.rank != 0) exchange(copy);
            if (r.rank == 2) exchange(sum);
            const auto part = [&](std::int64_t i, int from) {
              return i < 0 || i >= count ? 0.0f : static_cast<float>(2 * (count - 1 - i) % 1000 + from);
            };
            for (std::int64_t i = 0; i < count + count / 2; ++i) {
              const float expected = r.rank == 0   ? part(i, 1) + part(i - count / 2, 2)
                                     : r.rank == 2 ? part(i, 1)
                                                   : 0.0f;
              ASSERT_EQ(out.f32()[static_cast<std::size_t>(i)], expected) << i << " of " << count;
            }
          },
          5s);
}

// The memory for packed bytes is reused, however many exchanges are in flight.
TEST_P(Exchanges, RoundsUseTheSameMemory) {
  run(2, [&](Rank& r) {
    constexpr std::int64_t kCount = 1000;
    constexpr std::size_t kMany = 8;
    const Ring ring(r, kCount);
    std::vector<std::vector<float>> in(kMany, std::vector<float>(kCount)), out = in;
    PersistentExchange x = r.group().make_exchange(ring.plan);
    const auto bytes = [&] {
      const Arena::Counters c = arena_of(r.context).counters();
      return c.in_use_bytes + c.cached_bytes + c.quarantined_bytes;
    };
    std::size_t after_two = 0;
    for (int round = 0; round < 30; ++round) {
      std::vector<Work> works;
      for (std::size_t i = 0; i < kMany; ++i) {
        const ExchangeField field{in[i].data(), out[i].data()};
        works.push_back(x.start({&field, 1}));
      }
      for (Work& w : works) w.wait();
      r.group().barrier().wait();
      if (round == 1) after_two = bytes();
    }
    EXPECT_LE(bytes(), after_two);
    r.group().barrier().wait();
  });
}

// The check of the memory takes no longer if one element is sent very often.
TEST_P(Exchanges, OneElementIsSentVeryOften) {
  run(2, [&](Rank& r) {
    constexpr std::int64_t kCount = 50'000;
    ExchangePlan plan = Ring(r, kCount).plan;
    plan.sends[0].boxes.assign(kCount, {.field = 0, .offset = 0, .counts = {1}, .strides = {1}});
    plan.receives[0].boxes.clear();
    for (std::int64_t i = 0; i < kCount; ++i)
      plan.receives[0].boxes.push_back({.field = 0, .offset = i, .counts = {1}, .strides = {1}});
    std::vector<float> out(kCount);
    const float in = 7;
    const ExchangeField field{&in, out.data()};
    PersistentExchange x = r.group().make_exchange(plan);
    const auto before = std::chrono::steady_clock::now();
    Work work = x.start({&field, 1});
    EXPECT_LT(std::chrono::steady_clock::now() - before, 4s);
    work.wait();
    EXPECT_EQ(out, std::vector<float>(kCount, 7));
    r.group().barrier().wait();
  });
}

TEST_P(Exchanges, RanksOutsideOfThePlanDoNotTakePart) {
  run(3, [&](Rank& r) {
    if (r.rank > 1 || r.size < 2) return r.group().barrier().wait();
    ExchangePlan plan;
    plan.fields = {DType::i32};
    plan.sends = {{1 - r.rank, {{0, 0, {4}, {1}}}}};
    plan.receives = {{1 - r.rank, {{0, 4, {4}, {1}}}}};
    std::array<std::int32_t, 8> cells{};
    for (std::size_t i = 0; i < 4; ++i) cells[i] = r.rank * 10 + static_cast<std::int32_t>(i);
    const ExchangeField field{cells.data(), cells.data()};
    PersistentExchange x = r.group().make_exchange(plan);
    for (int i = 0; i < 100; ++i) x.start({&field, 1}).wait();
    EXPECT_EQ(cells[7], (1 - r.rank) * 10 + 3);
    r.group().barrier().wait();
  });
}

// Rank 1 gives another dtype, other boxes, fewer elements, another field, sums, or nothing: the text is the
// same over every transport.
TEST_P(Exchanges, RanksThatMeanDifferentThingsAreToldSo) {
  if (in_job()) GTEST_SKIP() << "a job with a failed group ends badly";
  struct Change {
    const char* name;
    std::function<void(ExchangePlan&)> make;
    const char *theirs, *own;
  };
  const std::vector<Change> changes{
      {"dtype", [](ExchangePlan& p) { p.fields[0] = DType::i32; },
       "2 fields: i32, f32, 400 bytes of boxes (100) of field 0",
       "2 fields: f32, f32, 400 bytes of boxes (100) of field 0"},
      {"boxes",
       [](ExchangePlan& p) {
         p.sends[0].boxes = {{0, 0, {50}, {1}}, {0, 50, {50}, {1}}};
       },
       "2 fields: f32, f32, 400 bytes of boxes (50) of field 0 and 1 more",
       "2 fields: f32, f32, 400 bytes of boxes (100) of field 0"},
      {"count", [](ExchangePlan& p) { p.sends[0].boxes[0].counts = {99}; },
       "2 fields: f32, f32, 396 bytes of boxes (99) of field 0",
       "2 fields: f32, f32, 400 bytes of boxes (100) of field 0"},
      {"field", [](ExchangePlan& p) { p.sends[0].boxes[0].field = 1; },
       "2 fields: f32, f32, 400 bytes of boxes (100) of field 1",
       "2 fields: f32, f32, 400 bytes of boxes (100) of field 0"},
      {"kind", [](ExchangePlan& p) { p.kind = ExchangePlan::Kind::add; },
       "sums of 2 fields: f32, f32, 400 bytes of boxes (100) of field 0",
       "2 fields: f32, f32, 400 bytes of boxes (100) of field 0"},
      {"nothing", [](ExchangePlan& p) { p.sends[0].boxes.clear(); }, "2 fields: f32, f32, 0 bytes",
       "2 fields: f32, f32, 400 bytes of boxes (100) of field 0"}};
  for (const Change& change : changes)
    for (const bool large : {false, true})
      run(2, [&](Rank& r) {
        const std::int64_t times = large ? 100 : 1, count = 100 * times;
        Ring ring(r, 100);
        ring.plan.fields.push_back(DType::f32);
        if (r.rank == 1) change.make(ring.plan);
        for (auto* list : {&ring.plan.sends, &ring.plan.receives})
          for (ExchangeBox& b : (*list)[0].boxes) {
            b.offset *= times;
            b.counts = {b.counts[0] * times};
          }
        if (r.rank == 0) ring.plan.sends.clear();
        if (r.rank == 1) ring.plan.receives.clear();
        std::vector<float> in(static_cast<std::size_t>(2 * count)), out = in;
        const std::vector<ExchangeField> fields{{in.data(), out.data()},
                                                {in.data() + count, out.data() + count}};
        PersistentExchange x = r.group().make_exchange(ring.plan);
        const Error e = error_of([&] {
          for (int i = 0; i < 100; ++i) x.start(fields).wait();
          r.group().barrier().wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << change.name << ": " << e.what();
        const auto words = [&](std::string text) {
          if (!large) return text;
          for (const char* const number : {"400", "396", "100)", "99)", "50)"})
            if (const auto at = text.find(number); at != text.npos)
              text.insert(at + std::strspn(number, "0123456789"), "00");
          return text;
        };
        const auto text = [&](const std::string& theirs) {
          return HasSubstr("exchange: rank 1 gave " + theirs + ", and rank 0 " + words(change.own) +
                           "; expected the same on all ranks");
        };
        // If the elements of a long message have not arrived, its length shows that it is another message.
        EXPECT_THAT(std::string(e.what()),
                    testing::AnyOf(text(words(change.theirs)), text("a message of u8 x40256")))
            << change.name;
      });
}

TEST_P(Exchanges, ANeighbourThatDoesNotComeIsNamed) {
  if (in_job()) GTEST_SKIP() << "a job with a failed group ends badly";
  run(
      3,
      [&](Rank& r) {
        const Ring ring(r, 10);
        r.group().barrier().wait();
        if (r.rank == 2) {
          std::this_thread::sleep_for(1500ms);
          return;
        }
        std::vector<float> in(10), out(10);
        const ExchangeField field{in.data(), out.data()};
        PersistentExchange x = r.group().make_exchange(ring.plan);
        const Error e = error_of([&] {
          for (;;) x.start({&field, 1}, {.deadline = 500ms}).wait();
        });
        EXPECT_TRUE(e.code() == ErrorCode::timeout || e.code() == ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(std::string(e.what()), HasSubstr("rank 2"));
        if (e.code() == ErrorCode::timeout && r.rank == 0) {
          EXPECT_THAT(std::string(e.what()),
                      testing::AllOf(HasSubstr("exchange: not finished within 0.5 s: rank "),
                                     HasSubstr(" has not sent its part"), HasSubstr("waits in an exchange")));
        }
      },
      5s);
}

TEST_P(Exchanges, WhatIsRefused) {
  run(2, [&](Rank& r) {
    if (r.size < 2) return;
    const Ring right(r, 4);
    const auto refused = [&](const std::function<void(ExchangePlan&)>& change, const std::string& text) {
      ExchangePlan plan = right.plan;
      change(plan);
      const Error e = error_of([&] { (void)r.group().make_exchange(plan); });
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_THAT(std::string(e.what()), HasSubstr(text));
    };
    const int to = (r.rank + 1) % r.size, from = (r.rank + r.size - 1) % r.size;
    const std::string what_is_sent = "the data sent to rank " + std::to_string(to) + ": ";
    const std::string what_comes = "the data received from rank " + std::to_string(from) + ": ";
    refused([](ExchangePlan& p) { p.sends[0].peer = 99; }, "exchange: sends[0].peer is 99; expected 0 to ");
    refused([](ExchangePlan& p) { p.receives[0].peer = -1; },
            "exchange: receives[0].peer is -1; expected 0 to ");
    refused([](ExchangePlan& p) { p.sends.push_back(p.sends[0]); },
            "exchange: sends names rank " + std::to_string(to) + " twice; expected one part for each rank");
    refused([](ExchangePlan& p) { p.sends[0].boxes[0].field = 1; },
            "exchange: box 0 of " + what_is_sent + "field is 1; expected 0 to 0");
    refused([](ExchangePlan& p) { p.sends[0].boxes[0].strides = {}; },
            "exchange: box 0 of " + what_is_sent + "it has 0 strides for 1 dimensions");
    refused([](ExchangePlan& p) { p.receives[0].boxes[0].counts = {-4}; },
            "exchange: box 0 of " + what_comes + "counts is (-4); expected no negative count");
    refused([](ExchangePlan& p) { p.receives[0].boxes[0].strides = {0}; },
            "exchange: box 0 of " + what_comes +
                "strides (0) of (4): elements share memory; expected each in a place of its own");
    refused([](ExchangePlan& p) { p.sends[0].boxes[0].offset = std::int64_t{1} << 60; },
            "reach farther than 2^56 bytes");
    refused([](ExchangePlan& p) { p.sends[0].boxes[0].strides = {std::int64_t{1} << 62}; },
            "reach farther than 2^56 bytes");
    refused([](ExchangePlan& p) { p.fields[0] = static_cast<DType>(99); }, "exchange: field 0 has dtype 99");
    refused([](ExchangePlan& p) { p.kind = static_cast<ExchangePlan::Kind>(7); },
            "exchange: kind is 7; expected 0 (copy) or 1 (add)");
    refused(
        [](ExchangePlan& p) {
          p.kind = ExchangePlan::Kind::add;
          p.fields[0] = DType::c64;
        },
        "exchange: field 0 is c64; expected a dtype that is added: an integer, or f64, f32, bf16, f16");
    refused(
        [&](ExchangePlan& p) {
          p.sends.push_back({r.rank, {{0, 0, {2}, {1}}}});
        },
        "exchange: this rank sends 1 boxes to itself and receives 0; expected as many");
    refused(
        [&](ExchangePlan& p) {
          p.sends.push_back({r.rank, {{0, 0, {2}, {1}}}});
          p.receives.push_back({r.rank, {{0, 8, {3}, {1}}}});
        },
        "exchange: box 0 of the data that this rank sends to itself is (2) of field 0, and (3) of field 0 "
        "where it is "
        "received; expected the same");
    refused(
        [](ExchangePlan& p) {
          p.name = "halo";
          p.sends[0].peer = 99;
        },
        "halo: sends[0].peer is 99");

    PersistentExchange x = r.group().make_exchange(right.plan);
    std::vector<float> in(8), out(8);
    const auto start = [&](std::vector<ExchangeField> fields) { x.start(fields).wait(); };
    const auto throws = [&](const std::function<void()>& f, const std::string& text) {
      const Error e = error_of(f);
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_THAT(std::string(e.what()), HasSubstr(text));
    };
    throws([&] { start({}); }, "exchange: there are 0 fields; expected 1, as the plan has");
    throws(
        [&] {
          start({{nullptr, out.data()}});
        },
        "exchange: in of field 0 has no memory; boxes of it are sent");
    throws(
        [&] {
          start({{in.data(), nullptr}});
        },
        "exchange: out of field 0 has no memory; boxes of it are received");
    throws(
        [&] {
          start({{in.data(), in.data() + 3}});
        },
        "exchange: a box of out of field 0 that is received and a box of in of field 0 that is sent overlap; "
        "expected disjoint memory");
    throws(
        [&] {
          (void)x.start(std::vector<ExchangeField>{{in.data(), out.data()}}, {.deadline = -1s});
        },
        "exchange: deadline is -1000000000 ns; expected 0 or more");
    throws([&] { (void)r.group().submit({.op = Op::exchange}); },
           "exchange: op is exchange, and a Call cannot hold its plan; call make_exchange() or exchange()");
    ExchangePlan twice = right.plan;
    twice.receives[0].boxes = {{0, 0, {2}, {1}}, {0, 1, {2}, {1}}};
    throws(
        [&] {
          const ExchangeField field{in.data(), out.data()};
          r.group().exchange(twice, {&field, 1}).wait();
        },
        "exchange: a box of out of field 0 that is received and a box of out of field 0 that is received "
        "overlap; expected disjoint memory");
    throws([] { (void)PersistentExchange().start({}); },
           "start: empty PersistentExchange: it was made by default or moved from; expected one that "
           "ProcessGroup::make_exchange() gave");
    throws([] { (void)ProcessGroup().make_exchange({}); }, "make_exchange");
    start({{in.data(), out.data()}});  // nothing of that has done any harm
    ProcessGroup other = r.group().duplicate();
    PersistentExchange left = other.make_exchange(right.plan);
    other.leave();
    throws(
        [&] {
          (void)left.start(std::vector<ExchangeField>{{in.data(), out.data()}});
        },
        "exchange: the group of this exchange has ended: its handle was destroyed, or has left it");
  });
}

// The rows of a mesh's partition. Each rank sends rows of an array (nodes, 3), and a number of each of them,
// by its own numbers. The other ranks have them as their ghosts, in one piece behind their own rows.
TEST_P(Exchanges, CarryTheNodesOfAPartition) {
  constexpr std::int64_t kShared = 5000, kNodes = 20000, kParts = 3;
  run(3, [&](Rank& r) {
    const int next = (r.rank + 1) % r.size, last = (r.rank + r.size - 1) % r.size;
    if (next == r.rank) return;
    std::vector<std::int64_t> nodes;
    for (std::int64_t i = 0; i < kShared; ++i) nodes.push_back((i * 7919 + r.rank * 31) % kNodes);
    ExchangePlan plan;
    plan.fields = {DType::f64, DType::i32};
    plan.sends = {{next, {{0, 0, {kShared, kParts}, {kParts, 1}, nodes}, {1, 0, {kShared}, {1}, nodes}}}};
    plan.receives = {
        {last, {{0, kNodes * kParts, {kShared, kParts}, {kParts, 1}}, {1, kNodes, {kShared}, {1}}}}};
    PersistentExchange x = r.group().make_exchange(plan);
    std::vector<double> points(static_cast<std::size_t>((kNodes + kShared) * kParts), -1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(kNodes + kShared), -1);
    for (int round = 0; round < 3; ++round) {
      const auto point = [&](int rank, std::int64_t i) {
        return static_cast<double>(rank * 100'000 + i + round);
      };
      for (std::int64_t i = 0; i < kNodes * kParts; ++i)
        points[static_cast<std::size_t>(i)] = point(r.rank, i);
      for (std::int64_t i = 0; i < kNodes; ++i)
        ids[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(point(r.rank, i));
      const std::array<ExchangeField, 2> fields = {
          {{points.data(), points.data()}, {ids.data(), ids.data()}}};
      x.start(fields).wait();
      for (std::int64_t i = 0; i < kShared; ++i) {
        const std::int64_t node = (i * 7919 + last * 31) % kNodes;
        for (std::int64_t c = 0; c < kParts; ++c)
          ASSERT_EQ(points[static_cast<std::size_t>((kNodes + i) * kParts + c)],
                    point(last, node * kParts + c));
        ASSERT_EQ(ids[static_cast<std::size_t>(kNodes + i)], static_cast<std::int32_t>(point(last, node)));
      }
    }
    // The adjoint: what the ghosts have is added to the nodes.
    ExchangePlan back;
    back.kind = ExchangePlan::Kind::add;
    back.fields = {DType::f64};
    back.sends = {{last, {plan.receives[0].boxes[0]}}};
    back.receives = {{next, {plan.sends[0].boxes[0]}}};
    const std::vector<double> before = points;
    r.group().exchange(back, std::array<ExchangeField, 1>{{{points.data(), points.data()}}}).wait();
    for (std::int64_t i = 0; i < kShared; ++i)
      for (std::int64_t c = 0; c < kParts; ++c) {
        const auto at = static_cast<std::size_t>(nodes[static_cast<std::size_t>(i)] * kParts + c);
        ASSERT_EQ(points[at], 2 * before[at]);
      }
  });
}

TEST(ExchangeIndices, AreChecked) {
  run_ranks(Ranks::threads, 1, [](Rank& r) {
    std::vector<float> in(100), out(100);
    const ExchangeField field{in.data(), out.data()}, in_place{in.data(), in.data()};
    const auto plan_of = [](ExchangeBox from, ExchangeBox to, ExchangePlan::Kind kind) {
      ExchangePlan plan;
      plan.kind = kind;
      plan.fields = {DType::f32};
      plan.sends = {{0, {std::move(from)}}};
      plan.receives = {{0, {std::move(to)}}};
      return plan;
    };
    const auto refused = [&](const ExchangeBox& from, const ExchangeBox& to, const std::string& text,
                             const ExchangeField& on, ExchangePlan::Kind kind = ExchangePlan::Kind::copy) {
      const Error e = error_of([&] { r.group().exchange(plan_of(from, to, kind), {&on, 1}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_THAT(e.what(), HasSubstr("exchange: " + text));
    };
    const auto taken = [&](const ExchangeBox& from, const ExchangeBox& to, const ExchangeField& on,
                           ExchangePlan::Kind kind = ExchangePlan::Kind::copy) {
      r.group().exchange(plan_of(from, to, kind), {&on, 1}).wait();
    };
    const ExchangeBox two{0, 0, {2}, {1}}, ends{0, 0, {2}, {1}, {9, 2}};
    refused(
        {0, 0, {3}, {1}, {9, 2}}, two,
        "box 0 of the data sent to rank 0: it has 2 indices for counts (3); expected as many as the first of "
        "these",
        field);
    refused({0, 0, {}, {}, {9}}, two, "box 0 of the data sent to rank 0: it has 1 indices for counts ()",
            field);
    refused(two, {0, 0, {2}, {1}, {4, -1}},
            "box 0 of the data received from rank 0: indices[1] is -1; expected 0 or more", field);
    refused(two, {0, 0, {2}, {1}, {4, 4}},
            "box 0 of the data received from rank 0: its indices name element 4 of the field twice; expected "
            "each "
            "once",
            field);
    refused({0, 0, {2, 2}, {2, 1}}, {0, 5, {2, 2}, {1, 1}, {8, 7}},
            "box 0 of the data received from rank 0: its indices name element 13 of the field twice", field);
    refused(
        {0, 0, {2}, {1}, {0, std::int64_t{1} << 60}}, two,
        "box 0 of the data sent to rank 0: counts (2) with strides (1) from offset 0 and its indices reach "
        "farther than 2^56 bytes",
        field);
    refused({0, 0, {2}, {std::int64_t{1} << 40}, {0, std::int64_t{1} << 40}}, two,
            "box 0 of the data sent to rank 0: counts", field);
    taken({0, 0, {2}, {1}, {4, 4}}, two, field);
    taken(two, {0, 0, {2}, {1}, {4, 4}}, field, ExchangePlan::Kind::add);
    // `in` and `out` are one memory: an element that is written must not also be sent, unless it is copied
    // onto itself.
    const char* const overlap =
        "a box of out of field 0 that is received and a box of in of field 0 that is sent overlap; expected "
        "disjoint memory";
    refused(ends, {0, 0, {2}, {1}, {2, 30}}, overlap, in_place);
    refused(ends, {0, 8, {2}, {1}}, overlap, in_place);
    refused(ends, {0, 1, {2}, {8}}, overlap, in_place);
    refused({0, 8, {2}, {1}}, {0, 0, {2}, {1}, {2, 9}}, overlap, in_place);
    taken(ends, ends, in_place);
    taken(ends, {0, 3, {2}, {4}}, in_place);
    taken(ends, {0, 0, {2}, {1}, {8, 3}}, in_place);
    refused(ends, ends, overlap, in_place, ExchangePlan::Kind::add);
    ExchangePlan several = plan_of(two, two, ExchangePlan::Kind::copy);
    several.sends[0].boxes.push_back(two);
    several.receives[0].boxes = {{0, 0, {2}, {1}, {9, 2}}, {0, 0, {2}, {1}, {4, 9}}};
    EXPECT_THAT(
        error_of([&] {
          r.group().exchange(several, {&field, 1}).wait();
        }).what(),
        HasSubstr("exchange: a box of out of field 0 that is received and a box of out of field 0 that is "
                  "received overlap"));
  });
}

TEST(BoxesOfIndices, AreOneBox) {
  const std::vector<std::vector<std::int64_t>> lists{
      {}, {5}, {5, 6}, {5, 4, 3, 2}, {0, 3, 6, 9, 10, 11, 12}, {7, 1, 2, 3, 9, 9, 9}, {1, 100, 3, 2, 50}};
  for (const auto& list : lists) {
    const std::vector<ExchangeBox> boxes = boxes_of(2, list);
    ASSERT_EQ(boxes.size(), 1U);
    EXPECT_EQ(boxes[0].field, 2);
    std::vector<std::int64_t> all;
    each_element(boxes[0], [&](std::int64_t at) { all.push_back(at); });
    EXPECT_EQ(all, list);
  }
}

}  // namespace
}  // namespace weft::test::exchange_test
