// Calls at random against values computed here. It uses every operation, with buffers that each rank lays out
// at random, many in flight, waited for in an order of each rank's own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "support/device_staging.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/values.hpp"

namespace weft::test {

// A call as all ranks know it.
struct Plan {
  Op op = Op::barrier;
  DType dtype = DType::f32;
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;
  std::int64_t seed = 0;                   // tells calls apart
  const DeviceStaging* staging = nullptr;  // takes the buffers to a device
  std::int64_t count = 0;                  // of each block, where the blocks are equal
  std::vector<std::int64_t> counts;        // v-forms: per rank; all_to_all_v: per (from, to)

  bool reduces() const {
    return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter ||
           op == Op::reduce_scatter_v || op == Op::scan || op == Op::exscan;
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
  // The number of ranks, from rank 0 on, whose combination rank `rank` gets.
  int combined_ranks(int rank, int n) const {
    return op == Op::scan ? rank + 1 : op == Op::exscan ? rank : n;
  }
  // Element i of what rank `from` gives for block `to` is value(from, index(to, i)).
  std::int64_t index(int to, std::int64_t i) const { return (in_parted() ? to * 977 : 0) + i + seed; }
};

inline std::ostream& operator<<(std::ostream& os, const Plan& p) {
  os << name(p.op) << " " << name(p.dtype) << " " << name(p.reduce) << " root " << p.root << " x" << p.count;
  for (const std::int64_t c : p.counts) os << " " << c;
  return os;
}

// One rank's part in it: buffers, laid out by this rank, and the check.
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
      case Op::all_reduce: return go(g, call::all_reduce(in, out, o));
      case Op::scan: return go(g, call::scan(in, out, o));
      case Op::exscan: return go(g, call::exscan(in, out, o));
      case Op::reduce: return go(g, call::reduce(in, out, p_.root, o));
      case Op::broadcast: return go(g, call::broadcast(in, out, p_.root));
      case Op::all_gather: return go(g, call::all_gather(in, out));
      case Op::all_gather_v: return go(g, call::all_gather_v(in, out, out_.blocks()));
      case Op::reduce_scatter: return go(g, call::reduce_scatter(in, out, o));
      case Op::reduce_scatter_v: return go(g, call::reduce_scatter_v(in, out, in_.blocks(), o));
      case Op::gather: return go(g, call::gather(in, out, p_.root));
      case Op::scatter: return go(g, call::scatter(in, out, p_.root));
      case Op::all_to_all: return go(g, call::all_to_all(in, out));
      case Op::all_to_all_v: return go(g, call::all_to_all_v(in, out, in_.blocks(), out_.blocks()));
      case Op::barrier: return go(g, call::barrier());
      case Op::send: {  // to the next, from the one before
        Call send = call::send(in, (rank_ + 1) % n_, {.tag = 1});
        Call receive = call::recv(out, (rank_ + n_ - 1) % n_, {.tag = 1});
        staging(send);
        staging(receive);
        work_ = g.coalesced({send, receive});
        return;
      }
      case Op::recv:
      case Op::exchange:
      case Op::wait_message:
      case Op::none: break;
    }
    FAIL() << name(p_.op);
  }

  void finish() {
    work_.wait();
    for (const auto& back : back_) back();
    if (out_.there) {
      std::vector<bool> written(static_cast<std::size_t>(out_.total), in_place_);
      each(out_, [&](int block, std::int64_t i, std::int64_t at) {
        written[static_cast<std::size_t>(at)] = true;
        const int from = p_.out_parted() ? block : p_.op == Op::send ? (rank_ + n_ - 1) % n_ : p_.root;
        const std::int64_t index = p_.index(rank_, i);
        const int ranks = p_.combined_ranks(rank_, n_);
        const double expected =
            !p_.reduces() ? value(from, index)
            : ranks > 0
                ? combined(p_.reduce, p_.dtype, ranks, index)
                : identity_of(p_.reduce, p_.dtype).value_or(in_place_ ? value(rank_, index) : kUntouched);
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
  void staging(Call& call) {
    if (p_.staging != nullptr) back_.push_back((*p_.staging)(call));
  }
  void go(ProcessGroup& g, Call call) {
    staging(call);
    work_ = g.submit(call);
  }

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
  std::vector<std::function<void()>> back_;
  Work work_;
};

/// The choices from which plans are made.
struct Variety {
  std::vector<std::int64_t> few{0, 1, 2, 3, 7, 13, 31, 61}, many{};  ///< counts; one call in three has many
  std::vector<DType> dtypes{DType::f32, DType::i32, DType::bf16, DType::f64, DType::u8};
  std::vector<ReduceOp> reductions{ReduceOp::sum, ReduceOp::max, ReduceOp::min, ReduceOp::avg};
  std::vector<Op> ops{Op::all_reduce, Op::reduce,           Op::broadcast, Op::all_gather, Op::all_gather_v,
                      Op::gather,     Op::reduce_scatter_v, Op::scatter,   Op::all_to_all, Op::all_to_all_v,
                      Op::send,       Op::reduce_scatter,   Op::barrier,   Op::scan,       Op::exscan};
  /// For a transport that cannot do them.
  void leave_out_scans() {
    std::erase_if(ops, [](Op op) { return op == Op::scan || op == Op::exscan; });
  }
  bool whole_averages = true;  ///< averages of integers, too; otherwise their sums
  DeviceStaging staging{};     ///< for transports that move a device's memory
};

inline Plan any_plan(std::mt19937& all, int n, const Variety& v) {
  const auto any = [&](const auto& list) { return list[all() % std::size(list)]; };
  const auto count = [&] { return v.many.empty() || all() % 3 ? any(v.few) : any(v.many); };
  Plan p;
  p.op = any(v.ops);
  p.dtype = any(v.dtypes);
  p.reduce = any(v.reductions);
  if (p.reduce == ReduceOp::avg && !v.whole_averages && !is_floating(p.dtype)) p.reduce = ReduceOp::sum;
  p.root = static_cast<int>(all() % static_cast<unsigned>(n));
  p.seed = all() % 1000;
  if (v.staging) p.staging = &v.staging;
  if (p.op == Op::all_gather_v || p.op == Op::reduce_scatter_v || p.op == Op::all_to_all_v) {
    p.counts.resize(static_cast<std::size_t>(p.op == Op::all_to_all_v ? n * n : n));
    for (std::int64_t& c : p.counts) c = count();
  } else if (p.op != Op::barrier) {
    p.count = count();
  }
  return p;
}

/// `calls` of them (a quarter under sanitizers, see does_everything()) on the group of `r`. `all` is the same
/// on all ranks, `own` is not. Memory: shared, local, or (nothing) any.
inline void calls_at_random(Rank& r, ProcessGroup& g, int calls, std::mt19937 all, std::mt19937 own,
                            const Variety& variety, std::optional<Memory> memory) {
  std::vector<std::unique_ptr<Trial>> open;
  if (!does_everything()) calls /= 4;
  for (int k = 0; k < calls; ++k) {
    const Plan plan = any_plan(all, r.size, variety);
    const Memory where = memory ? *memory : own() % 3 != 0 ? Memory::shared : Memory::local;
    open.push_back(std::make_unique<Trial>(r, plan, where, own));
    ASSERT_NO_THROW(open.back()->post(g)) << plan;
    while (open.size() > own() % 25) {
      const std::size_t which = own() % open.size();
      open[which]->finish();
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  for (auto& trial : open) trial->finish();
}

}  // namespace weft::test
