// Every collective, over rank counts, rank kinds, kinds of memory and paths, against values computed here. A
// rank of its own process runs all cases of its group one after the other.
#include <gtest/gtest.h>

#include <cstring>

#include "backends/reduce.hpp"
#include "backends/shm/control.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test {
namespace {

struct Setting {
  Ranks kind;
  int size;
  Memory memory;
  const char* path;
};

std::string setting_name(const testing::TestParamInfo<Setting>& info) {
  const Setting& s = info.param;
  return to_string(s.kind) + std::to_string(s.size) + (s.memory == Memory::shared ? "_shared" : "_foreign") +
         (*s.path ? std::string("_") + s.path : "");
}

// Sanitizers watch the ranks that are threads: all paths run there, in memory that they see.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kProcesses = false;
#else
constexpr bool kProcesses = true;
#endif

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const int n : {1, 2, 3, 4, 7}) {
    for (const char* path : {"", "direct", "staged", "inline"}) {
      if (*path && (n == 1 || n == 4)) continue;
      all.push_back({Ranks::threads, n, Memory::local, path});
      if (!kProcesses || std::string(path) == "inline") continue;
      all.push_back({Ranks::processes, n, Memory::shared, path});
      if (!*path) all.push_back({Ranks::processes, n, Memory::local, path});
    }
  }
  return all;
}

class Conformance : public testing::TestWithParam<Setting> {
 protected:
  // Counts around the borders of the paths, in elements of `dtype` per rank.
  std::vector<std::int64_t> counts(DType dtype) const {
    const std::int64_t element = size_bytes(dtype),
                       inlined = static_cast<std::int64_t>(shm::kInlineBytes) / element;
    if (std::string(GetParam().path) == "inline")
      return {0, 1, 7, 31, 64 / element + 1, inlined / GetParam().size};
    if (dtype != DType::f32) return {0, 1, 13, inlined + 1, 5003};
    const std::int64_t chunk = static_cast<std::int64_t>(shm::kChunkBytes) / element,
                       stage = static_cast<std::int64_t>(shm::kStageBytes) / element;
    return {0,           1,    2,         3,         31,        inlined - 1,   inlined,
            inlined + 1, 4099, stage - 1, stage + 1, chunk + 1, 5 * stage + 17};
  }

  void run(const std::function<void(Rank&)>& body) const {
    RankOptions options;
    options.hooks.path = GetParam().path;
    run_ranks(GetParam().kind, GetParam().size, body, options);
  }

  Tensor buffer(Rank& r, std::int64_t count, DType dtype) const {
    return Tensor(r.context, Shape{count}, dtype, GetParam().memory);
  }

  static void fill(const TensorView& v, int rank) {
    for (std::int64_t i = 0; i < v.count(); ++i) store(v, i, value(rank, i));
  }
};

const DType kReducible[] = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64};
const ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max};

TEST_P(Conformance, AllReduce) {
  run([&](Rank& r) {
    for (const DType dtype : kReducible) {
      for (const std::int64_t count : counts(dtype)) {
        for (const ReduceOp op : kOps) {
          for (const bool in_place : {false, true}) {
            const Tensor in = buffer(r, count, dtype), other = buffer(r, count, dtype),
                         out = in_place ? in : other;
            fill(in, r.rank);
            r.group().all_reduce(in, out, {.op = op}).wait();
            for (std::int64_t i = 0; i < count; ++i)
              ASSERT_EQ(load(out, i), combined(op, dtype, r.size, i))
                  << name(dtype) << " " << name(op) << " [" << i << "] of " << count << " in place "
                  << in_place;
          }
        }
      }
    }
  });
}

TEST_P(Conformance, ReduceScatter) {
  run([&](Rank& r) {
    for (const DType dtype : kReducible) {
      for (const std::int64_t count : counts(dtype)) {
        for (const bool in_place : {false, true}) {
          const ReduceOp op = dtype == DType::i32   ? ReduceOp::max
                              : dtype == DType::f64 ? ReduceOp::avg
                                                    : ReduceOp::sum;
          const Tensor in = buffer(r, count * r.size, dtype);
          const Tensor out = in_place ? in.slice_flat(count * r.rank, Shape{count}) : buffer(r, count, dtype);
          fill(in, r.rank);
          r.group().reduce_scatter(in, out, {.op = op}).wait();
          for (std::int64_t i = 0; i < count; ++i)
            ASSERT_EQ(load(out, i), combined(op, dtype, r.size, count * r.rank + i))
                << name(dtype) << " [" << i << "] of " << count << " in place " << in_place;
        }
      }
    }
  });
}

TEST_P(Conformance, AllGather) {
  run([&](Rank& r) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::u8, DType::boolean, DType::i64}) {
      for (const std::int64_t count : counts(dtype)) {
        for (const bool in_place : {false, true}) {
          const Tensor out = buffer(r, count * r.size, dtype);
          const Tensor in = in_place ? out.slice_flat(count * r.rank, Shape{count}) : buffer(r, count, dtype);
          for (std::int64_t i = 0; i < count * r.size; ++i) store(out, i, 1);
          for (std::int64_t i = 0; i < count; ++i) store(in, i, value(r.rank, i));
          r.group().all_gather(in, out).wait();
          for (int from = 0; from < r.size; ++from)
            for (std::int64_t i = 0; i < count; ++i) {
              const double expected = dtype == DType::boolean ? value(from, i) != 0 : value(from, i);
              ASSERT_EQ(load(out, from * count + i), expected)
                  << name(dtype) << " block " << from << " [" << i << "] of " << count << " in place "
                  << in_place;
            }
        }
      }
    }
  });
}

TEST_P(Conformance, Broadcast) {
  run([&](Rank& r) {
    for (const DType dtype : {DType::f32, DType::i16}) {
      for (const std::int64_t count : counts(dtype)) {
        for (int root = 0; root < r.size; ++root) {
          const Tensor in = buffer(r, count, dtype), out = r.rank % 2 ? in : buffer(r, count, dtype);
          fill(in, r.rank);
          r.group().broadcast(in, out, root).wait();
          for (std::int64_t i = 0; i < count; ++i)
            ASSERT_EQ(load(out, i), value(root, i))
                << name(dtype) << " [" << i << "] of " << count << " root " << root;
        }
      }
    }
  });
}

TEST_P(Conformance, BarrierHoldsEverybody) {
  run([&](Rank& r) {
    for (int round = 0; round < 20; ++round) {
      const std::string key = "barrier/" + std::to_string(round);
      if (r.size > 1) r.store->add(key, 1);
      r.group().barrier().wait();
      if (r.size > 1) {
        ASSERT_EQ(r.store->try_get(key), std::to_string(r.size)) << "round " << round;
      }
    }
  });
}

// Values whose sums round: every rank must have the bits of the canonical tree, whatever path and memory.
TEST_P(Conformance, CanonicalBits) {
  run([&](Rank& r) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
      for (const std::int64_t count : counts(dtype)) {
        std::vector<Tensor> all;
        std::vector<const std::byte*> ins;
        for (int from = 0; from < r.size; ++from) {
          all.push_back(buffer(r, count, dtype));
          std::uint64_t state = 0x9e3779b97f4a7c15ull * static_cast<std::uint64_t>(from + 1);
          for (std::int64_t i = 0; i < count; ++i) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            store(all.back(), i, (static_cast<double>(state >> 40) / (1 << 20) - 8) * (i % 5 ? 1 : 1e-3));
          }
          ins.push_back(all.back().data());
        }
        const Tensor expected = buffer(r, count, dtype), out = buffer(r, count, dtype);
        std::byte* const to = expected.data();
        reduce(dtype, ReduceOp::avg, ins, {&to, 1}, count);
        r.group()
            .all_reduce(all[static_cast<std::size_t>(r.rank)], out,
                        {.op = ReduceOp::avg, .order = Order::canonical})
            .wait();
        ASSERT_EQ(std::memcmp(out.data(), expected.data(), static_cast<std::size_t>(out.bytes())), 0)
            << name(dtype) << " x" << count;
      }
    }
  });
}

// Many calls in flight, waited for backwards, of every size.
TEST_P(Conformance, ManyInFlight) {
  run([&](Rank& r) {
    const bool small = std::string(GetParam().path) == "inline";
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int k = 0; k < 150; ++k) {
      const std::int64_t count = k % 3 == 0 && !small ? 3000 + k * 37 : k % 60;
      tensors.push_back(buffer(r, count, DType::f32));
      fill(tensors.back(), r.rank);
      works.push_back(k % 5 == 4 ? r.group().broadcast(tensors.back(), tensors.back(), k % r.size)
                                 : r.group().all_reduce(tensors.back(), tensors.back()));
    }
    for (int k = 149; k >= 0; --k) works[static_cast<std::size_t>(k)].wait();
    for (int k = 0; k < 150; ++k) {
      const Tensor& t = tensors[static_cast<std::size_t>(k)];
      for (std::int64_t i = 0; i < t.count(); ++i)
        ASSERT_EQ(load(t, i),
                  k % 5 == 4 ? value(k % r.size, i) : combined(ReduceOp::sum, DType::f32, r.size, i))
            << "call " << k << " [" << i << "]";
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shm, Conformance, testing::ValuesIn(settings()), setting_name);

}  // namespace
}  // namespace weft::test
