// Every operation, over backends, rank kinds, rank counts, kinds of memory and paths, against values computed
// here. Operations that the support table lists as unsupported must be refused. A backend is a row. Its ranks
// run all cases of a test in one group, one after the other.
//
// Under mpirun: WEFT_TEST_BACKEND=<name> mpirun -n N backends_conformance_test --gtest_filter='Job/*' runs
// the suite over that backend, each process being one rank.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "backends/compose/op_support.hpp"
#include "backends/shm/control.hpp"
#include "backends/shm/paths.hpp"
#include "reduce/reduce.hpp"
#include "support/averages.hpp"
#include "support/masked_backend.hpp"
#include "support/nccl_stand_in.hpp"
#include "support/on_device.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/values.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::conformance_test {
namespace {

struct Row {
  std::string label;
  std::string backend;
  std::optional<Mask> mask;  // of shm
};
struct Setting {
  Row row;
  Ranks kind = Ranks::threads;
  int size = 1;
  Memory memory = Memory::local;
  std::string path{};
  std::int64_t max_count = 0;
};

std::string to_string(const Setting& s) {
  return fmt::format("{}{}{}{}{}{}{}{}", s.row.label, s.row.label.empty() ? "" : "_", to_string(s.kind),
                     s.size, s.memory == Memory::shared ? "_shared" : "_foreign", s.path.empty() ? "" : "_",
                     s.path, s.max_count ? fmt::format("_by{}", s.max_count) : "");
}

std::string setting_name(const testing::TestParamInfo<Setting>& info) { return to_string(info.param); }
void PrintTo(const Setting& s, std::ostream* to) { *to << to_string(s); }

std::vector<Setting> shm_settings() {
  const Row shm{"", "shm", {}};
  std::vector<Setting> all;
  for (const int n : {1, 2, 3, 4, 7}) {
    for (const char* path : {"", "direct", "staged", "inline", "single"}) {
      if (*path && (n == 1 || n == 4)) continue;
      all.push_back({shm, Ranks::threads, n, Memory::local, path});
      if (!kProcesses || std::string(path) == "inline") continue;
      all.push_back({shm, Ranks::processes, n, Memory::shared, path});
      if (!*path) all.push_back({shm, Ranks::processes, n, Memory::local, path});
    }
  }
  return all;
}

std::vector<Row> masked_rows() {
  return {{"messages", "shm", messages_only()},
          {"all_to_all_v", "shm", all_to_all_v_only()},
          {"some", "shm", some()}};
}

std::vector<Setting> composed_settings() {
  std::vector<Setting> all;
  for (const Row& row : masked_rows()) {
    for (const int n : {1, 2, 3, 5}) all.push_back({row, Ranks::threads, n});
    if (kProcesses) all.push_back({row, Ranks::processes, 3});
  }
  return all;
}

// Why the backend is not available here. Empty: it is available.
std::string obstacle(const Row& row) {
  if (row.mask || row.backend == "shm" || row.backend == "nccl") return {};
  Context context;
  const Error e = error_of([&] { load_backend(context, row.backend); });
  return e.code() == ErrorCode::system && std::string(e.what()) == "no error was thrown" ? "" : e.what();
}

// If the backend is absent, one setting remains to report that.
std::vector<Setting> gloo_settings() {
  const Row gloo{"", "gloo", {}};
  if (!obstacle(gloo).empty()) return {{gloo, Ranks::threads, 2}};
  std::vector<Setting> all;
  for (const int n : {1, 2, 3}) all.push_back({gloo, Ranks::threads, n});
  all.push_back({gloo, Ranks::threads, 2, Memory::local, "", 1000});
  if (kProcesses)
    for (const int n : {2, 4}) all.push_back({gloo, Ranks::processes, n});
  return all;
}

// Runs over a stand-in for NCCL and CUDA; nccl_gpu_test tests a real GPU.
std::vector<Setting> nccl_settings() {
  const Row nccl{"", "nccl", {}};
  std::vector<Setting> all;
  for (const int n : {1, 2, 3, 5}) all.push_back({nccl, Ranks::threads, n});
  return all;
}

// The backend named by the environment, over the job this process is a rank of.
std::vector<Setting> job_settings() {
  const char* backend = std::getenv("WEFT_TEST_BACKEND");
  if (backend == nullptr) return {};
  const Row row{"", backend, {}};
  return {{row, Ranks::job, job_size()}, {row, Ranks::job, job_size(), Memory::local, "", 1000}};
}

const Traits* traits_of(const Row& row) {
  static std::vector<std::unique_ptr<Traits>> kept;
  if (!row.mask) {
    if (const Traits* const known = known_traits(row.backend)) return known;
    static Context context;
    return kept.emplace_back(std::make_unique<Traits>(backend_traits(context, row.backend))).get();
  }
  return kept.emplace_back(std::make_unique<Traits>(test::traits_of(*row.mask))).get();
}

// ---- One call and what it must give

struct Case {
  Op op = Op::none;
  DType dtype = DType::f32;
  std::int64_t count = 0;  // elements of a block, or of the whole if there are none
  ReduceOp reduce = ReduceOp::sum;
  Order order = Order::native;
  int root = 0;
  bool in_place = false;
  bool offsets = false;  // v-forms: blocks backwards, with room between them
  bool started = false;  // a persistent call, which is started twice
};

std::string to_string(const Case& c) {
  return fmt::format("{} {} x{}{}{} root {}{}{}{}", name(c.op), name(c.dtype), c.count,
                     row(c.op).reduces ? fmt::format(" {}", name(c.reduce)) : "",
                     c.order == Order::canonical ? " canonical" : "", c.root, c.in_place ? " in place" : "",
                     c.offsets ? " with offsets" : "", c.started ? ", started" : "");
}

bool is_v(Op op) { return op == Op::all_gather_v || op == Op::reduce_scatter_v || op == Op::all_to_all_v; }

// The input of ranks at `index`.
double given(const Case& c, int rank, std::int64_t index) {
  return row(c.op).reduces ? input(c.reduce, c.dtype, rank, index) : value(rank, index);
}

// The combination at `index`. Most repeat every 49 indices.
class Combination {
 public:
  Combination(const Case& c, int n) : case_(c), n_(n) {
    switch (c.reduce.kind) {
      case ReduceOp::Kind::sum:
      case ReduceOp::Kind::avg:
      case ReduceOp::Kind::min:
      case ReduceOp::Kind::max:
      case ReduceOp::Kind::premul_sum:
        for (std::int64_t i = 0; i < 49; ++i) period_.push_back(combined(c.reduce, c.dtype, n, i));
        break;
      case ReduceOp::Kind::prod:
      case ReduceOp::Kind::bit_and:
      case ReduceOp::Kind::bit_or:
      case ReduceOp::Kind::bit_xor:
      case ReduceOp::Kind::logical_and:
      case ReduceOp::Kind::logical_or:
      case ReduceOp::Kind::logical_xor:
      case ReduceOp::Kind::user: break;
    }
  }
  double operator()(std::int64_t index) const {
    return period_.empty() ? combined(case_.reduce, case_.dtype, n_, index)
                           : period_[static_cast<std::size_t>(index % 49)];
  }

 private:
  Case case_;
  int n_;
  std::vector<double> period_;
};

// The size of the block from rank `from` to rank `to`: uneven, sometimes 0, and the same on both ranks.
std::int64_t block_count(const Case& c, int from, int to) {
  const int which = c.op == Op::all_to_all_v ? from + 2 * to : c.op == Op::all_gather_v ? from : to;
  return which % 3 == 1 ? 0 : c.count + which;
}

struct Layout {
  std::vector<std::int64_t> counts, offsets;
  std::int64_t total = 0;
  Blocks blocks(bool with_offsets) const { return with_offsets ? Blocks{counts, offsets} : Blocks{counts}; }
};

Layout layout(const Case& c, const std::vector<std::int64_t>& counts, int rank) {
  Layout l{counts, std::vector<std::int64_t>(counts.size()), 0};
  if (!c.offsets) {
    for (std::size_t b = 0; b < counts.size(); ++b) {
      l.offsets[b] = l.total;
      l.total += counts[b];
    }
    return l;
  }
  l.total = rank;  // each rank's own
  for (std::size_t b = counts.size(); b-- > 0;) {
    l.offsets[b] = l.total;
    l.total += counts[b] + 1;
  }
  return l;
}

constexpr double kUntouched = 1;

class Conformance : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (const std::string why = obstacle(GetParam().row); !why.empty()) GTEST_SKIP() << why;
    traits_ = traits_of(GetParam().row);
  }

  OpSupport support_of(const Case& c) const {
    return op_support(*traits_, c.op, c.dtype, c.reduce.kind, c.order);
  }
  bool has_messages() const { return traits_->has(Op::send) && traits_->has(Op::recv); }
  bool is_shm() const { return GetParam().row.backend == "shm" && !GetParam().row.mask; }

  // Small counts, for products of everything else.
  std::vector<std::int64_t> few() const { return {1, 13}; }

  // Counts around the limits between the paths.
  std::vector<std::int64_t> counts(DType dtype) const {
    const Setting& s = GetParam();
    const std::int64_t element = size_bytes(dtype);
    if (!is_shm()) {
      if (s.max_count) return {0, s.max_count - 1, s.max_count, 3 * s.max_count + 17};
      if (dtype != DType::f32) return {0, 1, 13, 5003};
      return {0, 1, 2, 3, 31, 1021, 4099, 65537, 150001};
    }
    const std::int64_t inlined = static_cast<std::int64_t>(shm::kInlineBytes) / element;
    if (s.path == "inline") return {0, 1, 7, 31, 64 / element + 1, inlined / s.size};
    if (dtype != DType::f32) return {0, 1, 13, inlined + 1, 5003};
    const std::int64_t chunk = static_cast<std::int64_t>(shm::kChunkBytes) / element,
                       stage = static_cast<std::int64_t>(shm::kStageBytes) / element;
    const std::int64_t combined = shm::inline_bytes(Op::all_reduce) / element;
    return {0,       1,           2,    3,         31,        combined,  combined + 1,  inlined - 1,
            inlined, inlined + 1, 4099, stage - 1, stage + 1, chunk + 1, 5 * stage + 17};
  }
  // The inline path takes what fits beside an arrival line.
  bool fits(const Case& c) const {
    if (GetParam().path != "inline") return true;
    const std::int64_t n = GetParam().size, most = c.count + (is_v(c.op) ? 3 * n : 0);
    return most * n * size_bytes(c.dtype) <= static_cast<std::int64_t>(shm::kInlineBytes);
  }

  void run(const std::function<void(Rank&)>& body) const {
    const Setting& s = GetParam();
    RankOptions options;
    options.hooks.path = s.path;
    options.hooks.max_count = s.max_count;
    options.backend = s.row.backend;
    if (s.row.mask) options.factory = masked(*s.row.mask);
    std::optional<NcclStandIn> nccl;
    if (s.row.backend == "nccl") options.factory = nccl.emplace().factory();
    run_ranks(s.kind, s.size, body, options);
    if (!nccl) return;
    EXPECT_THAT(nccl->complaints(), testing::IsEmpty());
    EXPECT_THAT(nccl->leftovers(), testing::IsEmpty());
  }
  OnDevice group(Rank& r) const {
    return {r.group(), traits_->device ? Device{DeviceKind::cuda, 0} : Device{}};
  }

  bool averages(DType dtype) const {
    return op_support(*traits_, Op::all_reduce, dtype, ReduceOp::Kind::avg, Order::native) !=
           OpSupport::unsupported;
  }
  Tensor buffer(Rank& r, std::int64_t count, DType dtype) const {
    return Tensor(r.context, Shape{count}, dtype, GetParam().memory);
  }
  static void fill(const TensorView& v, int rank) {
    for (std::int64_t i = 0; i < v.count(); ++i) store(v, i, value(rank, i));
  }

  void perform(Rank& r, const Case& c) const;

  void expect_refused_messages() const {
    run([&](Rank& r) {
      const Tensor t = buffer(r, 1, DType::f32);
      EXPECT_EQ(error_of([&] { group(r).send(t, 0).wait(); }).code(), ErrorCode::unsupported);
      EXPECT_EQ(error_of([&] { group(r).recv(t, 0).wait(); }).code(), ErrorCode::unsupported);
    });
  }

  const Traits* traits_ = nullptr;
};

// Makes the buffers of one call, carries it out and looks at every element of `out`.
void Conformance::perform(Rank& r, const Case& c) const {
  if (!fits(c)) return;
  const int n = r.size, me = r.rank;
  const OpRow about = row(c.op);
  const bool in_here = has_in(c.op, me == c.root), out_here = has_out(c.op, me == c.root);
  std::vector<std::int64_t> in_counts, out_counts;
  for (int p = 0; p < n; ++p) {
    in_counts.push_back(about.counts == Counts::in_blocks || about.counts == Counts::both_blocks
                            ? block_count(c, me, p)
                            : c.count);
    out_counts.push_back(about.counts == Counts::out_blocks || about.counts == Counts::both_blocks
                             ? block_count(c, p, me)
                             : c.count);
  }
  const bool in_parted = about.counts == Counts::in_blocks || about.counts == Counts::both_blocks ||
                         about.counts == Counts::in_is_n_out || c.op == Op::all_to_all;
  const bool out_parted = about.counts == Counts::out_blocks || about.counts == Counts::both_blocks ||
                          about.counts == Counts::out_is_n_in || c.op == Op::all_to_all;
  const Layout in_layout = layout(c, in_counts, me), out_layout = layout(c, out_counts, me);
  const auto own = static_cast<std::size_t>(me);
  const std::int64_t in_total = in_parted    ? in_layout.total
                                : out_parted ? out_layout.counts[own]
                                             : c.count,
                     out_total = out_parted  ? out_layout.total
                                 : in_parted ? in_layout.counts[own]
                                             : c.count;
  // The places of blocks: in a parted `in`, block b begins at logical index begins[b] of what this rank
  // gives.
  Tensor in = buffer(r, in_here ? in_total : 0, c.dtype), out = buffer(r, out_here ? out_total : 0, c.dtype);
  if (c.in_place && in_here && out_here) {
    if (!in_parted && !out_parted) out = in;
    if (in_parted) out = in.slice_flat(in_layout.offsets[own], Shape{out_total});
    if (out_parted) in = out.slice_flat(out_layout.offsets[own], Shape{in_total});
  }
  // Block b of what rank `from` gives begins at this index of its values; all ranks agree where it matters.
  const auto begins = [&](int from, int b) {
    if (c.op == Op::all_to_all_v) return static_cast<std::int64_t>(b) * 1000;
    std::int64_t begin = 0;
    for (int k = 0; k < b; ++k)
      begin += about.counts == Counts::in_blocks ? block_count(c, from, k) : c.count;
    return begin;
  };
  const auto lay = [&] {
    for (std::int64_t i = 0; i < out.shape().count(); ++i) store(out, i, kUntouched);
    if (in_here && in_parted) {
      for (std::int64_t i = 0; i < in.shape().count(); ++i) store(in, i, kUntouched);
      for (int b = 0; b < n; ++b)
        for (std::int64_t i = 0; i < in_layout.counts[static_cast<std::size_t>(b)]; ++i)
          store(in, in_layout.offsets[static_cast<std::size_t>(b)] + i, given(c, me, begins(me, b) + i));
    } else if (in_here) {
      for (std::int64_t i = 0; i < in_total; ++i) store(in, i, given(c, me, i));
    }
  };
  lay();

  const Call call{.op = c.op,
                  .in = in_here ? ConstTensorView(in) : ConstTensorView{},
                  .out = out_here ? TensorView(out) : TensorView{},
                  .root = about.rooted == Rooted::no && c.op != Op::broadcast ? -1 : c.root,
                  .in_blocks = about.counts == Counts::in_blocks || about.counts == Counts::both_blocks
                                   ? in_layout.blocks(c.offsets)
                                   : Blocks{},
                  .out_blocks = about.counts == Counts::out_blocks || about.counts == Counts::both_blocks
                                    ? out_layout.blocks(c.offsets)
                                    : Blocks{},
                  .options = {.op = c.reduce, .order = c.order}};
  if (support_of(c) == OpSupport::unsupported) {
    const Error e = error_of([&] {
      if (c.started) {
        group(r).make(call);
      } else {
        group(r).submit(call).wait();
      }
    });
    ASSERT_EQ(e.code(), ErrorCode::unsupported) << to_string(c) << ": " << e.what();
    return;
  }
  if (c.started) {
    PersistentCall persistent = group(r).make(call);
    persistent.start().wait();
    lay();
    persistent.start().wait();
  } else {
    group(r).submit(call).wait();
  }
  if (!out_here) return;

  std::vector<double> expected(static_cast<std::size_t>(out_total), stored(c.dtype, kUntouched));
  const auto expect = [&](std::int64_t at, double x) { expected[static_cast<std::size_t>(at)] = x; };
  if (about.reduces) {
    const int ranks = c.op == Op::scan ? me + 1 : c.op == Op::exscan ? me : n;
    if (ranks == 0) {  // the identity, or nothing
      for (std::int64_t i = 0; i < out_total; ++i)
        expect(i, identity_of(c.reduce, c.dtype)
                      .value_or(stored(c.dtype, c.in_place ? given(c, me, i) : kUntouched)));
    } else {
      const Combination all(c, ranks);
      for (std::int64_t i = 0; i < out_total; ++i) expect(i, all((in_parted ? begins(me, me) : 0) + i));
    }
  } else if (!out_parted) {  // broadcast, scatter
    for (std::int64_t i = 0; i < out_total; ++i)
      expect(i, stored(c.dtype, value(c.root, (in_parted ? begins(c.root, me) : 0) + i)));
  } else {
    for (int p = 0; p < n; ++p)
      for (std::int64_t i = 0; i < out_layout.counts[static_cast<std::size_t>(p)]; ++i)
        expect(out_layout.offsets[static_cast<std::size_t>(p)] + i,
               stored(c.dtype, value(p, (in_parted ? begins(p, me) : 0) + i)));
  }
  for (std::int64_t i = 0; i < out_total; ++i)
    ASSERT_EQ(load(out, i), expected[static_cast<std::size_t>(i)])
        << to_string(c) << ": [" << i << "], rank " << me << " of " << n;
}

const Op kReducing[] = {Op::all_reduce,       Op::reduce, Op::reduce_scatter,
                        Op::reduce_scatter_v, Op::scan,   Op::exscan};
const Op kMoving[] = {Op::broadcast, Op::all_gather, Op::all_gather_v, Op::gather,
                      Op::scatter,   Op::all_to_all, Op::all_to_all_v};
bool may_be_in_place(Op op) { return op != Op::all_to_all && op != Op::all_to_all_v; }

// The group's traits equal the row of the table.
TEST_P(Conformance, TraitsAreTheTables) {
  run([&](Rank& r) {
    const Traits& t = group(r).traits();
    EXPECT_EQ(t.name, traits_->name);
    EXPECT_EQ(t.ops, traits_->ops);
    EXPECT_EQ(t.dtypes, traits_->dtypes);
    EXPECT_EQ(t.reduces, traits_->reduces);
    EXPECT_EQ(t.native_is_canonical, traits_->native_is_canonical);
    EXPECT_EQ(t.device, traits_->device);
    EXPECT_EQ(t.progress, traits_->progress);
    EXPECT_EQ(t.guarantees, traits_->guarantees);
  });
}

TEST_P(Conformance, EveryReductionOfEveryDtype) {
  run([&](Rank& r) {
    int k = 0;
    for (const Op op : kReducing)
      for (int kind = 0; kind < kReduceKindCount; ++kind)
        for (int d = 0; d < kDTypeCount; ++d)
          for (const std::int64_t count : few())
            for (const Order order : {Order::native, Order::canonical}) {
              if (order == Order::canonical && count != 1) continue;
              if (!kEveryKernel && static_cast<DType>(d) != DType::f32 &&
                  static_cast<ReduceOp::Kind>(kind) != ReduceOp::Kind::sum)
                continue;
              const Case c{.op = op,
                           .dtype = static_cast<DType>(d),
                           .count = count,
                           .reduce = reduction(static_cast<ReduceOp::Kind>(kind)),
                           .order = order,
                           .root = k % r.size,
                           .in_place = k % 3 == 0,
                           .offsets = is_v(op) && k % 2 == 0};
              ++k;
              ASSERT_NO_FATAL_FAILURE(perform(r, c));
            }
  });
}

TEST_P(Conformance, EveryMoveOfEveryDtype) {
  run([&](Rank& r) {
    int k = 0;
    for (const Op op : kMoving)
      for (int d = 0; d < kDTypeCount; ++d)
        for (const std::int64_t count : few()) {
          const Case c{.op = op,
                       .dtype = static_cast<DType>(d),
                       .count = count,
                       .root = k % r.size,
                       .in_place = may_be_in_place(op) && k % 3 == 0,
                       .offsets = is_v(op) && k % 2 == 0};
          ++k;
          ASSERT_NO_FATAL_FAILURE(perform(r, c));
        }
  });
}

// Counts around the limits between the paths, in place and not, with every root; v-forms with offsets of
// their blocks.
TEST_P(Conformance, EveryOperationOfManySizes) {
  run([&](Rank& r) {
    const auto all = [&](const auto& ops, DType dtype, ReduceOp reduce) {
      int k = 0;
      for (const Op op : ops)
        for (const std::int64_t most : counts(dtype))
          for (const bool in_place : {false, true})
            for (int root = 0; root < (row(op).rooted == Rooted::no ? 1 : r.size); ++root) {
              // Large buffers: the same number of bytes for every operation, but not all combinations.
              const bool large = most > 5003,
                         blocks = row(op).counts != Counts::equal || op == Op::all_to_all;
              if (large && (root > 0 || in_place != (++k % 2 == 0))) continue;
              if (in_place && !may_be_in_place(op)) continue;
              const std::int64_t count = large && blocks ? most / r.size + 1 : most;
              const Case c{.op = op,
                           .dtype = dtype,
                           .count = count,
                           .reduce = reduce,
                           .root = large ? static_cast<int>(count % r.size) : root,
                           .in_place = in_place,
                           .offsets = is_v(op) && count % 2 == 1};
              ASSERT_NO_FATAL_FAILURE(perform(r, c));
            }
    };
    ASSERT_NO_FATAL_FAILURE(all(kReducing, DType::f32, ReduceOp::sum));
    ASSERT_NO_FATAL_FAILURE(all(kMoving, DType::f32, ReduceOp::sum));
    if (!kEveryKernel) return;
    ASSERT_NO_FATAL_FAILURE(all(kReducing, DType::bf16, ReduceOp::avg));
    ASSERT_NO_FATAL_FAILURE(all(kReducing, DType::i32, ReduceOp::max));
    ASSERT_NO_FATAL_FAILURE(all(kMoving, DType::boolean, ReduceOp::sum));
  });
}

// Persistent calls give what plain calls give, each time that they are started.
TEST_P(Conformance, EveryOperationStarted) {
  run([&](Rank& r) {
    const auto all = [&](const auto& ops) {
      int k = 0;
      for (const Op op : ops)
        for (const std::int64_t count : {0, 1, 13, 4099})
          for (const bool in_place : {false, true}) {
            if (in_place && !may_be_in_place(op)) continue;
            const Case c{.op = op,
                         .dtype = k % 2 == 0 ? DType::f32 : DType::i32,
                         .count = count,
                         .reduce = k % 3 == 0 ? ReduceOp::max : ReduceOp::sum,
                         .order = row(op).reduces && k % 4 == 1 ? Order::canonical : Order::native,
                         .root = k % r.size,
                         .in_place = in_place,
                         .offsets = is_v(op) && k % 2 == 1,
                         .started = true};
            ++k;
            ASSERT_NO_FATAL_FAILURE(perform(r, c));
          }
    };
    ASSERT_NO_FATAL_FAILURE(all(kReducing));
    ASSERT_NO_FATAL_FAILURE(all(kMoving));
    PersistentCall barrier = group(r).make(call::barrier());
    for (int k = 0; k < 3; ++k) barrier.start().wait();
    if (!has_messages() || r.size == 1) return;
    // Around the ring, the tags of two messages in flight at a time.
    const int to = (r.rank + 1) % r.size, from = (r.rank + r.size - 1) % r.size;
    std::vector<Tensor> buffers;
    std::vector<PersistentCall> calls;
    for (const int tag : {3, 4}) {
      buffers.push_back(buffer(r, 5003, DType::f32));
      fill(buffers.back(), r.rank + tag);
      calls.push_back(group(r).make(call::send(buffers.back(), to, {.tag = tag})));
      buffers.push_back(buffer(r, 5003, DType::f32));
      calls.push_back(group(r).make(call::recv(buffers.back(), from, {.tag = tag})));
    }
    for (int round = 0; round < 3; ++round) {
      fill(buffers[1], -1);
      fill(buffers[3], -1);
      std::vector<Work> works;
      for (PersistentCall& c : calls) works.push_back(c.start());
      wait_all(works);
      for (const int tag : {3, 4})
        for (std::int64_t i = 0; i < 5003; ++i)
          ASSERT_EQ(load(buffers[static_cast<std::size_t>(2 * tag - 5)], i), value(from + tag, i))
              << "tag " << tag;
    }
  });
}

// Empty tensors and prime counts in every v-form.
TEST_P(Conformance, EmptyAndPrimeCountsInEveryVForm) {
  run([&](Rank& r) {
    for (const Op op : {Op::all_gather_v, Op::reduce_scatter_v, Op::all_to_all_v})
      for (const DType dtype : {DType::f64, DType::f16, DType::u8})
        for (const std::int64_t count : {0, 2, 7, 31, 127, 499})
          for (const bool offsets : {false, true}) {
            const Case c{.op = op, .dtype = dtype, .count = count, .offsets = offsets};
            ASSERT_NO_FATAL_FAILURE(perform(r, c));
          }
    // Nothing at all, from null buffers.
    const std::vector<std::int64_t> none(static_cast<std::size_t>(r.size));
    const ConstTensorView in = view(static_cast<const float*>(nullptr), 0);
    const TensorView out = view(static_cast<float*>(nullptr), 0);
    group(r).all_gather_v(in, out, {none}).wait();
    group(r).reduce_scatter_v(in, out, {none}).wait();
    group(r).all_to_all_v(in, out, {none}, {none}).wait();
  });
}

// Averages that other libraries computed as sums, or rounded before the division.
TEST_P(Conformance, ReduceScatterAvgIsTheSumOverN) {
  run([&](Rank& r) {
    for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8, DType::i32,
                              DType::i64, DType::u8, DType::u64}) {
      if (!averages(dtype)) continue;
      const Tensor in = buffer(r, 5 * r.size, dtype), out = buffer(r, 5, dtype);
      for (std::int64_t i = 0; i < 5 * r.size; ++i) store(in, i, static_cast<double>(r.rank + i % 5));
      group(r).reduce_scatter(in, out, {.op = ReduceOp::avg}).wait();
      for (std::int64_t i = 0; i < 5; ++i) {
        const double sum = r.size * (r.size - 1) / 2.0 + static_cast<double>((r.rank * 5 + i) % 5) * r.size;
        const double mean = dtype == DType::f64  ? sum / r.size
                            : is_floating(dtype) ? static_cast<float>(sum) / static_cast<float>(r.size)
                                                 : std::trunc(sum / r.size);
        ASSERT_EQ(load(out, i), stored(dtype, mean)) << name(dtype) << " [" << i << "]";
      }
      if (dtype != DType::i8 && dtype != DType::i32 && dtype != DType::i64) continue;
      for (std::int64_t i = 0; i < 5 * r.size; ++i) store(in, i, -static_cast<double>(r.rank + 1));
      group(r).reduce_scatter(in, out, {.op = ReduceOp::avg}).wait();  // toward zero
      ASSERT_EQ(load(out, 0), -std::trunc((r.size + 1) / 2.0)) << name(dtype);
    }
  });
}

// Averages of numbers whose sum wraps or is infinite in their dtype, in each operation that has averages.
TEST_P(Conformance, AveragesOfExtremes) {
  run([&](Rank& r) {
    for (const DType dtype : averaged_dtypes())
      for (const std::int64_t count : {std::int64_t{1}, std::int64_t{37}, std::int64_t{1501}}) {
        const std::int64_t whole = count * r.size;
        if (!fits({.op = Op::reduce_scatter, .dtype = dtype, .count = count})) continue;
        std::vector<Tensor> all;
        std::vector<const std::byte*> ins, parts;
        for (int from = 0; from < r.size; ++from) {
          all.push_back(buffer(r, whole, dtype));
          for (std::int64_t i = 0; i < whole; ++i) store_extreme(all.back().data(), dtype, from, i);
          ins.push_back(all.back().data());
          parts.push_back(ins.back() + r.rank * count * size_bytes(dtype));
        }
        const Tensor& own = all[static_cast<std::size_t>(r.rank)];
        const Tensor out = buffer(r, whole, dtype), part = buffer(r, count, dtype);
        const auto right = [&](Op op, const std::vector<const std::byte*>& from, const Tensor& got) {
          ASSERT_EQ(wrong_average(dtype, from, got.data(), got.count()), "")
              << name(op) << " " << name(dtype) << " x" << got.count();
        };
        const CallOptions average{.op = ReduceOp::avg};
        if (!averages(dtype)) {
          EXPECT_EQ(error_of([&] { group(r).all_reduce(own, out, average).wait(); }).code(),
                    ErrorCode::unsupported);
          continue;
        }
        group(r).all_reduce(own, out, average).wait();
        right(Op::all_reduce, ins, out);
        group(r).reduce_scatter(own, part, average).wait();
        right(Op::reduce_scatter, parts, part);
        group(r).submit(call::reduce(own, out, 0, average)).wait();
        if (r.rank == 0) right(Op::reduce, ins, out);
        if (traits_->device) continue;  // no scans there
        group(r).submit(call::scan(own, out, average)).wait();
        ins.resize(static_cast<std::size_t>(r.rank + 1));
        right(Op::scan, ins, out);
      }
  });
}

// 256 + 1 + 1 + … in bf16 stays 256 where each step is rounded.
TEST_P(Conformance, Bf16SumsAccumulateInF32) {
  run([&](Rank& r) {
    const Tensor t = buffer(r, 3, DType::bf16), parts = buffer(r, 3 * r.size, DType::bf16);
    for (std::int64_t i = 0; i < 3; ++i) store(t, i, r.rank == 0 ? 256 : 1);
    for (std::int64_t i = 0; i < 3 * r.size; ++i) store(parts, i, r.rank == 0 ? 256 : 1);
    const double expected = stored(DType::bf16, 256 + r.size - 1);
    group(r).all_reduce(t, t).wait();
    for (std::int64_t i = 0; i < 3; ++i) ASSERT_EQ(load(t, i), expected);
    group(r).reduce_scatter(parts, t).wait();
    for (std::int64_t i = 0; i < 3; ++i) ASSERT_EQ(load(t, i), expected);
  });
}

TEST_P(Conformance, BarrierHoldsEverybody) {
  run([&](Rank& r) {
    for (int round = 0; round < 20; ++round) {
      const std::string key = "barrier/" + std::to_string(round);
      if (r.size > 1) r.store->add(key, 1);
      group(r).barrier().wait();
      if (r.size > 1) {
        ASSERT_EQ(r.store->try_get(key), std::to_string(r.size)) << "round " << round;
      }
    }
  });
}

// Values whose sums round.
void fill_rounding(const TensorView& v, int rank) {
  std::uint64_t state = 0x9e3779b97f4a7c15ull * static_cast<std::uint64_t>(rank + 1);
  for (std::int64_t i = 0; i < v.count(); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    store(v, i, (static_cast<double>(state >> 40) / (1 << 20) - 8) * (i % 5 ? 1 : 1e-3));
  }
}

// Every rank must have the bits of the canonical tree, whatever path and memory.
TEST_P(Conformance, CanonicalBits) {
  run([&](Rank& r) {
    if (traits_->device) {  // nobody computes there: refused
      const Tensor t = buffer(r, 1, DType::f32);
      EXPECT_EQ(error_of([&] { group(r).all_reduce(t, t, {.order = Order::canonical}).wait(); }).code(),
                ErrorCode::unsupported);
      return;
    }
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
      for (const std::int64_t count : counts(dtype)) {
        std::vector<Tensor> all;
        std::vector<const std::byte*> ins;
        for (int from = 0; from < r.size; ++from) {
          all.push_back(buffer(r, count, dtype));
          fill_rounding(all.back(), from);
          ins.push_back(all.back().data());
        }
        const Tensor expected = buffer(r, count, dtype), out = buffer(r, count, dtype);
        std::byte* const to = expected.data();
        reduce(dtype, ReduceOp::avg, ins, {&to, 1}, count);
        group(r)
            .all_reduce(all[static_cast<std::size_t>(r.rank)], out,
                        {.op = ReduceOp::avg, .order = Order::canonical})
            .wait();
        ASSERT_EQ(std::memcmp(out.data(), expected.data(), static_cast<std::size_t>(out.bytes())), 0)
            << name(dtype) << " x" << count;
      }
    }
  });
}

// A scan has the bits of an all_reduce over the ranks up to this one. An exscan has those of an all_reduce
// over the ranks below it.
TEST_P(Conformance, CanonicalBitsOfScans) {
  run([&](Rank& r) {
    if (traits_->device) {  // NCCL has no scans
      const Tensor t = buffer(r, 1, DType::f32);
      for (const Order order : {Order::native, Order::canonical})
        EXPECT_EQ(error_of([&] { group(r).submit(call::scan(t, t, {.order = order})).wait(); }).code(),
                  ErrorCode::unsupported);
      return;
    }
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::c64})
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
        for (const std::int64_t count : counts(dtype)) {
          if (!fits({.op = Op::scan, .dtype = dtype, .count = count})) continue;
          std::vector<Tensor> all;
          std::vector<const std::byte*> ins;
          for (int from = 0; from < r.size; ++from) {
            all.push_back(buffer(r, count, dtype));
            fill_rounding(all.back(), from);
            ins.push_back(all.back().data());
          }
          const Tensor expected = buffer(r, count, dtype), out = buffer(r, count, dtype);
          const Tensor& own = all[static_cast<std::size_t>(r.rank)];
          std::byte* const to = expected.data();
          const auto same = [&](const Tensor& got) {
            return std::memcmp(got.data(), expected.data(), static_cast<std::size_t>(got.bytes())) == 0;
          };
          const auto upto = static_cast<std::size_t>(r.rank);
          if (r.rank > 0) reduce(dtype, op, std::span(ins).first(upto), {&to, 1}, count);
          group(r).submit(call::exscan(own, out, {.op = op, .order = Order::canonical})).wait();
          ASSERT_TRUE(r.rank == 0 || same(out)) << "exscan " << name(dtype) << " x" << count;
          reduce(dtype, op, std::span(ins).first(upto + 1), {&to, 1}, count);
          group(r).submit(call::scan(own, own, {.op = op, .order = Order::canonical})).wait();
          ASSERT_TRUE(same(own)) << "scan " << name(dtype) << " x" << count;
        }
  });
}

// Many calls of every size in flight, waited for in reverse order.
TEST_P(Conformance, ManyInFlight) {
  run([&](Rank& r) {
    const bool small = GetParam().path == "inline";
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int k = 0; k < 150; ++k) {
      const std::int64_t count = k % 3 == 0 && !small ? 3000 + k * 37 : k % 60;
      tensors.push_back(buffer(r, count, DType::f32));
      fill(tensors.back(), r.rank);
      works.push_back(k % 5 == 4 ? group(r).broadcast(tensors.back(), tensors.back(), k % r.size)
                                 : group(r).all_reduce(tensors.back(), tensors.back()));
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

TEST_P(Conformance, ManyAsOne) {
  run([&](Rank& r) {
    const std::int64_t n = r.size;
    const Tensor sum = buffer(r, 31, DType::f32), all = buffer(r, 7 * n, DType::i32),
                 part = all.slice_flat(7 * r.rank, Shape{7}), least = buffer(r, 3, DType::f64);
    fill(sum, r.rank);
    fill(part, r.rank);
    fill(least, r.rank);
    group(r)
        .coalesced({call::all_reduce(sum, sum), call::all_gather(part, all), call::barrier(),
                    call::all_reduce(least, least, {.op = ReduceOp::min})})
        .wait();
    for (std::int64_t i = 0; i < 31; ++i)
      ASSERT_EQ(load(sum, i), combined(ReduceOp::sum, DType::f32, r.size, i));
    for (std::int64_t i = 0; i < 7 * n; ++i) ASSERT_EQ(load(all, i), value(static_cast<int>(i / 7), i % 7));
    for (std::int64_t i = 0; i < 3; ++i)
      ASSERT_EQ(load(least, i), combined(ReduceOp::min, DType::f64, r.size, i));
  });
}

// ---- Messages

TEST_P(Conformance, RingsOfEveryDtype) {
  if (!has_messages()) return expect_refused_messages();
  run([&](Rank& r) {
    if (r.size == 1) return;
    const int next = (r.rank + 1) % r.size, last = (r.rank + r.size - 1) % r.size;
    for (int d = 0; d < kDTypeCount; ++d) {
      for (const std::int64_t count : {0, 1, 13, 5003}) {
        const auto dtype = static_cast<DType>(d);
        const Tensor in = buffer(r, count, dtype), out = buffer(r, count, dtype);
        fill(in, r.rank);
        group(r).send_recv(in, next, out, last, {.tag = d}).wait();
        for (std::int64_t i = 0; i < count; ++i)
          ASSERT_EQ(load(out, i), stored(dtype, value(last, i))) << name(dtype) << " [" << i << "]";
      }
    }
  });
}

// Tags out of order, between collectives, both sides posting sends first: nothing waits behind another.
TEST_P(Conformance, TagsOutOfOrderBetweenCollectives) {
  if (!has_messages()) return expect_refused_messages();
  run([&](Rank& r) {
    if (r.size == 1) return;
    constexpr int kTags = 5;
    const std::int64_t sizes[kTags] = {0, 3, 1021, 70001, 17};
    const int next = (r.rank + 1) % r.size, last = (r.rank + r.size - 1) % r.size;
    std::vector<Tensor> in, out;
    std::vector<Work> works;
    for (int t = 0; t < kTags; ++t) {
      in.push_back(buffer(r, sizes[t], DType::f32));
      out.push_back(buffer(r, sizes[t], DType::f32));
      fill(in.back(), r.rank + t);
      works.push_back(group(r).send(in.back(), next, {.tag = t}));
    }
    const Tensor sum = buffer(r, 100, DType::f32);
    fill(sum, r.rank);
    const Order order = traits_->device ? Order::native : Order::canonical;
    Work between = group(r).all_reduce(sum, sum, {.order = order});
    for (int t = kTags - 1; t >= 0; --t)
      works.push_back(group(r).recv(out[static_cast<std::size_t>(t)], last, {.tag = t}));
    for (Work& w : works) w.wait();
    between.wait();
    for (int t = 0; t < kTags; ++t)
      for (std::int64_t i = 0; i < sizes[t]; ++i)
        ASSERT_EQ(load(out[static_cast<std::size_t>(t)], i), value(last + t, i)) << "tag " << t;
    for (std::int64_t i = 0; i < 100; ++i)
      ASSERT_EQ(load(sum, i), combined(ReduceOp::sum, DType::f32, r.size, i));
  });
}

// Rank 0 sends to rank 1 while the others do nothing.
TEST_P(Conformance, APairNeedsNobodyElse) {
  if (!has_messages()) return expect_refused_messages();
  run([&](Rank& r) {
    if (r.size == 1) return;
    const Tensor t = buffer(r, 5003, DType::i16);
    group(r);
    if (r.rank == 0) {
      fill(t, 0);
      group(r).send(t, 1).wait();
    } else if (r.rank == 1) {
      group(r).recv(t, 0).wait();
      for (std::int64_t i = 0; i < 5003; ++i) ASSERT_EQ(load(t, i), value(0, i));
      r.store->set("got it", "1");
    }
    if (r.rank > 1) r.store->get("got it", Deadline::after(std::chrono::seconds(20)));
    group(r).barrier().wait();
  });
}

// Groups of other sizes.
TEST_P(Conformance, SplitOffGroups) {
  run([&](Rank& r) {
    std::vector<int> ranks;
    for (int p = r.rank % 2; p < r.size; p += 2) ranks.push_back(p);
    ProcessGroup half = group(r).subgroup(r.rank % 2 ? "odd" : "even", ranks);
    OnDevice on_half(half, traits_->device ? Device{DeviceKind::cuda, 0} : Device{});
    for (const std::int64_t count : {1, 101}) {
      const Tensor t = buffer(r, count, DType::f32);
      fill(t, half.rank());
      on_half.all_reduce(t, t).wait();
      for (std::int64_t i = 0; i < count; ++i)
        ASSERT_EQ(load(t, i), combined(ReduceOp::sum, DType::f32, half.size(), i));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shm, Conformance, testing::ValuesIn(shm_settings()), setting_name);
INSTANTIATE_TEST_SUITE_P(Composed, Conformance, testing::ValuesIn(composed_settings()), setting_name);
INSTANTIATE_TEST_SUITE_P(Gloo, Conformance, testing::ValuesIn(gloo_settings()), setting_name);
INSTANTIATE_TEST_SUITE_P(Nccl, Conformance, testing::ValuesIn(nccl_settings()), setting_name);
INSTANTIATE_TEST_SUITE_P(Job, Conformance, testing::ValuesIn(job_settings()), setting_name);

// ---- One hash on every backend

std::uint64_t hash(const std::byte* data, std::int64_t bytes, std::uint64_t h) {  // FNV-1a
  for (std::int64_t i = 0; i < bytes; ++i) h = (h ^ static_cast<std::uint64_t>(data[i])) * 0x100000001b3ull;
  return h;
}

using OneHash = Conformance;

// Canonical sums, averages and products of n = 2 … 8 ranks have the bits that `reduce` gives here. The hash
// over them is printed, to be compared between backends and machines.
TEST_P(OneHash, OfCanonicalReductions) {
  constexpr std::int64_t kCount = 1021;
  const int n = GetParam().size;
  const auto reductions = [](const auto& body) {
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::c64})
      for (const ReduceOp& op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::premul_sum(0.3)}) {
        if (can_reduce(dtype, op.kind)) body(dtype, op);
      }
  };
  std::uint64_t expected = 0xcbf29ce484222325ull;
  {
    std::vector<std::byte> room(static_cast<std::size_t>((n + 1) * kCount) * 16);
    reductions([&](DType dtype, ReduceOp op) {
      const std::int64_t bytes = kCount * size_bytes(dtype);
      std::vector<const std::byte*> ins;
      for (int p = 0; p < n; ++p) {
        const TensorView v{room.data() + p * bytes, dtype, Device{}, {kCount}};
        fill_rounding(v, p);
        ins.push_back(v.data);
      }
      std::byte* const out = room.data() + n * bytes;
      reduce(dtype, op, ins, {&out, 1}, kCount);
      expected = hash(out, bytes, expected);
    });
  }
  run([&](Rank& r) {
    std::uint64_t got = 0xcbf29ce484222325ull;
    reductions([&](DType dtype, ReduceOp op) {
      const Tensor in = buffer(r, kCount, dtype), out = buffer(r, kCount, dtype);
      fill_rounding(in, r.rank);
      r.group().all_reduce(in, out, {.op = op, .order = Order::canonical}).wait();
      got = hash(out.data(), out.bytes(), got);
    });
    EXPECT_EQ(got, expected) << "rank " << r.rank;
  });
  const std::string text = fmt::format("{:016x}", expected);
  RecordProperty("canonical_hash", text);
  fmt::print("canonical hash n={} {}\n", n, text);
}

std::vector<Setting> every_size(const std::vector<Row>& rows, Ranks kind, int most) {
  std::vector<Setting> all;
  for (const Row& row : rows)
    for (int n = 2; n <= most; ++n) all.push_back({row, kind, n});
  return all;
}

std::vector<Setting> gloo_hash_settings() {
  const Row gloo{"", "gloo", {}};
  return every_size({gloo}, Ranks::threads, obstacle(gloo).empty() ? 8 : 2);
}

std::vector<Setting> job_hash_settings() {
  const char* backend = std::getenv("WEFT_TEST_BACKEND");
  return backend && job_size() > 1 ? std::vector<Setting>{{{"", backend, {}}, Ranks::job, job_size()}}
                                   : std::vector<Setting>{};
}

INSTANTIATE_TEST_SUITE_P(Shm, OneHash, testing::ValuesIn(every_size({{"", "shm", {}}}, Ranks::threads, 8)),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(Composed, OneHash, testing::ValuesIn(every_size(masked_rows(), Ranks::threads, 8)),
                         setting_name);
INSTANTIATE_TEST_SUITE_P(Gloo, OneHash, testing::ValuesIn(gloo_hash_settings()), setting_name);
INSTANTIATE_TEST_SUITE_P(Job, OneHash, testing::ValuesIn(job_hash_settings()), setting_name);

}  // namespace
}  // namespace weft::test::conformance_test
