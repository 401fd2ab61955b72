// What is particular to shared memory: every operation on each of its paths, with memory that some ranks
// share and others do not, in any order and many at once, against values computed here; what ranks that call
// different things are told; who may run ahead of whom.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>

#include "backends/shm/control.hpp"
#include "support/shm_settings.hpp"
#include "support/values.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// A call as all ranks know it.
struct Plan {
  Op op = Op::barrier;
  DType dtype = DType::f32;
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;
  std::int64_t seed = 0;             // tells calls apart
  std::int64_t count = 0;            // of each block, where the blocks are equal
  std::vector<std::int64_t> counts;  // v-forms: per rank; all_to_all_v: per (from, to)

  bool reduces() const {
    return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter || op == Op::reduce_scatter_v;
  }
  bool in_parted() const {  // `in` has a block for each rank
    return op == Op::scatter || op == Op::reduce_scatter || op == Op::reduce_scatter_v ||
           op == Op::all_to_all || op == Op::all_to_all_v;
  }
  bool out_parted() const {  // `out` has a block from each rank
    return op == Op::gather || op == Op::all_gather || op == Op::all_gather_v || op == Op::all_to_all ||
           op == Op::all_to_all_v;
  }
  bool has_in(int rank) const { return (op != Op::broadcast && op != Op::scatter) || rank == root; }
  bool has_out(int rank) const { return (op != Op::reduce && op != Op::gather) || rank == root; }
  std::int64_t elements(int from, int to, int n) const {
    if (op == Op::all_to_all_v) return counts[static_cast<std::size_t>(from * n + to)];
    if (op == Op::all_gather_v) return counts[static_cast<std::size_t>(from)];
    if (op == Op::reduce_scatter_v) return counts[static_cast<std::size_t>(to)];
    return count;
  }
  // Element i of what rank `from` gives for block `to` is value(from, index(to, i)).
  std::int64_t index(int to, std::int64_t i) const { return (in_parted() ? to * 977 : 0) + i + seed; }
};

std::ostream& operator<<(std::ostream& os, const Plan& p) {
  os << name(p.op) << " " << name(p.dtype) << " " << name(p.reduce) << " root " << p.root << " x" << p.count;
  for (const std::int64_t c : p.counts) os << " " << c;
  return os;
}

// One rank's part in it: buffers, laid out as this rank likes, and the check.
class Trial {
 public:
  Trial(Rank& r, const Plan& plan, Memory memory, std::mt19937& own) : p_(plan), rank_(r.rank), n_(r.size) {
    const auto blocks = [&](bool parted, bool has, const auto& elements) {
      Side side;
      std::vector<std::size_t> order(parted ? static_cast<std::size_t>(n_) : 1);
      std::iota(order.begin(), order.end(), std::size_t{0});
      const bool loose = parted && !p_.counts.empty() && own() % 2 == 0;  // gaps, and in any order
      if (loose) std::shuffle(order.begin(), order.end(), own);
      side.counts.resize(order.size());
      side.offsets.resize(order.size());
      for (const std::size_t b : order) {
        side.counts[b] = elements(static_cast<int>(b));
        side.offsets[b] = side.total + (loose ? own() % 3 : 0);
        side.total = side.offsets[b] + side.counts[b];
      }
      side.loose = loose;
      side.there = has && p_.op != Op::barrier;
      return side;
    };
    in_ = blocks(p_.in_parted(), p_.has_in(rank_), [&](int to) { return p_.elements(rank_, to, n_); });
    out_ = blocks(p_.out_parted(), p_.has_out(rank_), [&](int from) { return p_.elements(from, rank_, n_); });
    const bool both = in_.there && out_.there;
    in_place_ =
        both && p_.op != Op::all_to_all && p_.op != Op::all_to_all_v && p_.op != Op::send && own() % 2 == 0;
    const auto me = static_cast<std::size_t>(rank_);
    const auto buffer = [&](std::int64_t count) {
      Tensor t(r.context, Shape{count}, p_.dtype, memory);
      for (std::int64_t i = 0; i < count; ++i) store(t, i, kUntouched);
      return t;
    };
    if (in_place_ && p_.out_parted()) {
      out_.tensor = buffer(out_.total);
      in_.tensor = out_.tensor->slice_flat(out_.offsets[me], Shape{in_.total});
    } else if (in_place_ && p_.in_parted()) {
      in_.tensor = buffer(in_.total);
      out_.tensor = in_.tensor->slice_flat(in_.offsets[me], Shape{out_.total});
    } else {
      if (in_.there) in_.tensor = buffer(in_.total);
      if (out_.there) out_.tensor = in_place_ ? in_.tensor : buffer(out_.total);
    }
    if (in_.there)
      each(in_, [&](int to, std::int64_t i, std::int64_t at) {
        store(*in_.tensor, at, value(rank_, p_.index(to, i)));
      });
  }

  void post(ProcessGroup& g) {
    const ConstTensorView in = in_.there ? ConstTensorView(*in_.tensor) : ConstTensorView{};
    const TensorView out = out_.there ? TensorView(*out_.tensor) : TensorView{};
    const CallOptions o{.op = p_.reduce};
    switch (p_.op) {
      case Op::all_reduce: work_ = g.all_reduce(in, out, o); return;
      case Op::reduce: work_ = g.reduce(in, out, p_.root, o); return;
      case Op::broadcast: work_ = g.broadcast(in, out, p_.root); return;
      case Op::all_gather: work_ = g.all_gather(in, out); return;
      case Op::all_gather_v: work_ = g.all_gather_v(in, out, out_.blocks()); return;
      case Op::reduce_scatter: work_ = g.reduce_scatter(in, out, o); return;
      case Op::reduce_scatter_v: work_ = g.reduce_scatter_v(in, out, in_.blocks(), o); return;
      case Op::gather: work_ = g.gather(in, out, p_.root); return;
      case Op::scatter: work_ = g.scatter(in, out, p_.root); return;
      case Op::all_to_all: work_ = g.all_to_all(in, out); return;
      case Op::all_to_all_v: work_ = g.all_to_all_v(in, in_.blocks(), out, out_.blocks()); return;
      case Op::barrier: work_ = g.barrier(); return;
      case Op::send:  // to the next, from the one before
        work_ = g.send_recv(in, (rank_ + 1) % n_, out, (rank_ + n_ - 1) % n_, {.tag = 1});
        return;
      case Op::recv:
      case Op::none: break;
    }
    FAIL() << name(p_.op);
  }

  void finish() {
    work_.wait();
    if (out_.there) {
      std::vector<bool> written(static_cast<std::size_t>(out_.total), in_place_);
      each(out_, [&](int block, std::int64_t i, std::int64_t at) {
        written[static_cast<std::size_t>(at)] = true;
        const int from = p_.out_parted() ? block : p_.op == Op::send ? (rank_ + n_ - 1) % n_ : p_.root;
        const std::int64_t index = p_.index(rank_, i);
        const double expected = p_.reduces() ? combined(p_.reduce, p_.dtype, n_, index) : value(from, index);
        ASSERT_EQ(load(*out_.tensor, at), expected)
            << p_ << ": block " << block << " [" << i << "] of rank " << rank_ << ", in place " << in_place_;
      });
      for (std::int64_t i = 0; i < out_.total; ++i)
        if (!written[static_cast<std::size_t>(i)]) {
          ASSERT_EQ(load(*out_.tensor, i), kUntouched) << p_ << ": between the blocks, at " << i;
        }
    }
    if (in_.there && !in_place_)
      each(in_, [&](int to, std::int64_t i, std::int64_t at) {
        ASSERT_EQ(load(*in_.tensor, at), value(rank_, p_.index(to, i))) << p_ << ": in was changed at " << at;
      });
  }

 private:
  static constexpr int kUntouched = 77;
  struct Side {
    bool there = false, loose = false;
    std::vector<std::int64_t> counts, offsets;
    std::int64_t total = 0;
    std::optional<Tensor> tensor;
    Blocks blocks() const { return loose ? Blocks{counts, offsets} : Blocks{counts}; }
  };
  template <class F>
  static void each(const Side& side, const F& f) {
    for (std::size_t b = 0; b < side.counts.size(); ++b)
      for (std::int64_t i = 0; i < side.counts[b]; ++i) f(static_cast<int>(b), i, side.offsets[b] + i);
  }

  const Plan p_;
  const int rank_, n_;
  Side in_, out_;
  bool in_place_ = false;
  Work work_;
};

Plan any_plan(std::mt19937& all, int n, bool small) {
  constexpr Op kOps[] = {
      Op::all_reduce, Op::reduce,           Op::broadcast, Op::all_gather, Op::all_gather_v,
      Op::gather,     Op::reduce_scatter_v, Op::scatter,   Op::all_to_all, Op::all_to_all_v,
      Op::send,       Op::reduce_scatter,   Op::barrier};
  constexpr DType kDTypes[] = {DType::f32, DType::i32, DType::bf16, DType::f64, DType::u8};
  const ReduceOp kReductions[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::min, ReduceOp::avg};
  const std::int64_t inlined = static_cast<std::int64_t>(shm::kInlineBytes) / 4;
  const std::int64_t few[] = {0, 1, 2, 3, 7, 13, 31, 61};
  const std::int64_t many[] = {0, 1, 13, inlined / n, inlined, inlined + 1, 1009, 5003, 40009};
  const auto count = [&] {
    return small || all() % 3 ? few[all() % std::size(few)] : many[all() % std::size(many)];
  };
  Plan p;
  p.op = kOps[all() % std::size(kOps)];
  p.dtype = kDTypes[all() % std::size(kDTypes)];
  p.reduce = kReductions[all() % std::size(kReductions)];
  p.root = static_cast<int>(all() % static_cast<unsigned>(n));
  p.seed = all() % 1000;
  if (p.op == Op::all_gather_v || p.op == Op::reduce_scatter_v || p.op == Op::all_to_all_v) {
    p.counts.resize(static_cast<std::size_t>(p.op == Op::all_to_all_v ? n * n : n));
    for (std::int64_t& c : p.counts) c = count();
  } else if (p.op != Op::barrier) {
    p.count = count();
  }
  return p;
}

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
    for (const char* path : {"", "direct", "staged", "inline"})
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

// Hundreds of calls, many in flight, waited for in an order of each rank's own: the ring of arrivals, the
// staging buffers and the tables of blocks are used over and over, by another operation each time.
TEST_P(AtRandom, AllOperationsInterleaved) {
  const RandomCase c = GetParam();
  RankOptions options;
  options.hooks.path = c.path;
  run_ranks(
      c.kind, c.size,
      [&](Rank& r) {
        std::mt19937 all(static_cast<unsigned>(7 * c.size + std::string(c.path).size())),
            own(static_cast<unsigned>(100 + r.rank));
        std::vector<std::unique_ptr<Trial>> open;
        for (int k = 0; k < 400; ++k) {
          const Plan plan = any_plan(all, r.size, std::string(c.path) == "inline");
          const Memory memory = c.where == Where::shared || (c.where == Where::mixed && own() % 3 != 0)
                                    ? Memory::shared
                                    : Memory::local;
          open.push_back(std::make_unique<Trial>(r, plan, memory, own));
          ASSERT_NO_THROW(open.back()->post(r.group())) << plan;
          while (open.size() > own() % 25) {
            const std::size_t which = own() % open.size();
            open[which]->finish();
            open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
            if (testing::Test::HasFatalFailure()) return;
          }
        }
        for (auto& trial : open) trial->finish();
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

// With the ring full a rank posts two calls; meanwhile there is room for both. The first must be published
// first: who sees the second compares the first too.
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
      static_cast<void>(works.back().wait_for(20ms));  // a stale line would be a mismatch here
      r.meet("looked");
    }
    for (Work& w : works) w.wait();
    EXPECT_EQ(load(t, 1), value(2, 1));
  });
}

// The root of a scatter needs nobody: it is rings ahead before the others come.
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

TEST_P(Shm, EverythingEmpty) {
  run(3, [](Rank& r) {
    const Tensor none = buffer(r, 0);
    const std::int64_t zeros[] = {0, 0, 0};
    for (int round = 0; round < 20; ++round) {
      ProcessGroup& g = r.group();
      g.all_gather_v(none, none, {zeros}).wait();
      g.reduce_scatter_v(none, none, {zeros}).wait();
      g.all_to_all_v(none, {zeros}, none, {zeros}).wait();
      g.all_to_all(none, none).wait();
      g.gather(none, none, round % 3).wait();
      g.scatter(none, none, round % 3).wait();
      g.reduce(none, none, round % 3).wait();
      // Large buffers of which nothing is moved.
      const Tensor big = buffer(r, 5000), other = buffer(r, 5000);
      g.all_to_all_v(big, {zeros}, other, {zeros}).wait();
      g.reduce_scatter_v(big, none, {zeros}).wait();
      for (int i = 0; i < 5000; ++i) ASSERT_EQ(load(other, i), value(r.rank, i));
    }
  });
}

// Both halves of the text name what a rank called; who is named first is whoever did not notice.
void expect_mismatch(int n, const std::function<void(Rank&)>& call, const std::vector<std::string>& parts) {
  run_ranks(kProcesses ? Ranks::processes : Ranks::threads, n, [&](Rank& r) {
    const Error e = error_of([&] {
      call(r);
      r.group().barrier().wait();  // the root of a scatter hears of it at its next call
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

// The whole vector is compared, also where this rank's own block and the sum are the same.
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
          r.group().all_to_all_v(tensor(r, 10 * scale), {send}, tensor(r, 10 * scale), {recv}).wait();
        },
        {"all_to_all_v: rank 1 sends " + five + " elements to rank 0, which expects " +
         std::to_string(7 * scale)});
  }
}

// Shared memory is read and written where it lies; what is not shared never is.
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
        {"all_to_all_v", [&] { return g.all_to_all_v(all, {counts}, other, {counts}); }},
    };
    for (const auto& [what, call] : calls) {
      in_place = 0;
      call().wait();
      EXPECT_EQ(in_place > 0, direct) << what;
    }
  });
}

}  // namespace
}  // namespace weft::test
