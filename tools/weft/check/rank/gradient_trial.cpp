#include "rank/gradient_trial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/reduce_gradients.hpp"
#include "weft/dp/sharded_parameters.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::check {
namespace {

constexpr DType kGradients[] = {DType::f32, DType::f32, DType::bf16, DType::f16, DType::f64};
constexpr ReduceOp::Kind kReductions[] = {ReduceOp::Kind::sum, ReduceOp::Kind::avg};

Step bytes_of(Step s) {
  s.dtype = DType::u8;
  return s;
}

template <class List>
void shuffle(Dice& d, List& list) {
  for (std::size_t i = list.size(); i > 1; --i)
    std::swap(list[i - 1], list[static_cast<std::size_t>(d.below(i))]);
}

}  // namespace

GradientTrial::GradientTrial(Context& context, const Step& s, int me, int n, Pool* pool, bool alone)
    : s_(s),
      memory_(bytes_of(s)),
      me_(me),
      n_(n),
      alone_(alone),
      bytes_(s.gradients.bytes),
      buffers_(context, memory_, pool) {
  make_entries();
  if (s.differs) differ();
  lay_out();
}

// Alike on all ranks.
void GradientTrial::make_entries() {
  Dice d(mix(s_.salt, 31));
  unused_is_error_ = d.one_in(2);
  gradient_dtype_ = d.any(kGradients);
  op_ = d.any(kReductions);
  std::vector<int> divisors;
  for (int k = 1; k <= n_; ++k)
    if (n_ % k == 0) divisors.push_back(k);
  if (s_.gradients.at_once) tp_ = d.any(divisors);
  for (std::size_t i = 0; i < s_.counts.size(); ++i) {
    Dice of_entry(mix(s_.salt, i + 300));
    Entry e;
    e.name = fmt::format("tensor {}", i);
    e.rows = s_.counts[i];
    e.dtype = of_entry.any(kGradients);
    e.reduce = of_entry.any(kReductions);
    e.bound = of_entry.one_in(2);
    if (s_.gradients.cut) {
      e.dtype = static_cast<DType>(of_entry.below(kDTypeCount));
      e.columns = of_entry.between(1, kMostColumns);
    }
    if (s_.gradients.at_once) {
      e.bound = true;
      e.placements = any_placements(of_entry, e);
    }
    entries_.push_back(e);
  }
}

// Placements on dp and tp. Needs no separate group if it is partial on all ranks, or on none.
Placements GradientTrial::any_placements(Dice& d, const Entry& e) const {
  const Partial partial{{e.reduce}};
  const Shard rows{0};
  const Replicate same{};
  const std::vector<Placements> all = {{partial, partial}, {partial, partial}, {rows, rows},   {rows, same},
                                       {partial, rows},    {partial, same},    {rows, partial}};
  return all[static_cast<std::size_t>(d.below(alone_ ? all.size() : 4))];
}

// This rank passes a different value, which is right in itself.
void GradientTrial::differ() {
  enum { name, count, dtype, more, limit, reduction, option };
  Dice d(mix(s_.salt, 4712));
  Entry& e = entries_[static_cast<std::size_t>(d.below(entries_.size()))];
  const DType other = e.dtype == DType::f32 ? DType::f64 : DType::f32;
  odd_ = s_.gradients.at_once;  // if it has no other difference
  switch (d.between(name, option)) {
    case name: e.name = "another tensor"; return;
    case count: ++e.rows; return;
    case dtype: e.dtype = other; return;
    case more: entries_.push_back(e); return;
    case limit: ++bytes_; return;
    case reduction: {
      const bool nothing =
          std::all_of(s_.counts.begin(), s_.counts.end(), [](std::int64_t c) { return c == 0; });
      if (s_.gradients.cut && nothing) break;  // no rank would notice
      ReduceOp::Kind& kind = s_.gradients.cut ? op_ : e.reduce;
      for (Placement& p : e.placements)
        if (is_partial(p))
          p = Partial{{kind == ReduceOp::Kind::sum ? ReduceOp::Kind::avg : ReduceOp::Kind::sum}};
      kind = kind == ReduceOp::Kind::sum ? ReduceOp::Kind::avg : ReduceOp::Kind::sum;
      return;
    }
    case option: break;
  }
  unused_is_error_ = !unused_is_error_;
  gradient_dtype_ = gradient_dtype_ == DType::f32 ? DType::f64 : DType::f32;
}

void GradientTrial::lay_out() {
  Dice habits(mix(s_.salt, static_cast<std::uint64_t>(me_) + 1000));
  for (Entry& e : entries_) {
    const std::int64_t value = size_bytes(e.dtype), gradient = size_bytes(gradient_dtype_);
    if (s_.gradients.at_once) {
      const int place[] = {me_ / tp_, me_ % tp_}, size[] = {n_ / tp_, tp_};
      e.local = e.rows;
      for (std::size_t a = 0; a < 2; ++a)
        if (is_shard(e.placements[a])) e.local = e.local / size[a] + (place[a] < e.local % size[a] ? 1 : 0);
      e.data = buffers_.room(habits, e.local * value);
      continue;
    }
    if (!s_.gradients.cut) {
      if (e.bound) e.data = buffers_.room(habits, e.count() * value);
      continue;
    }
    e.data = buffers_.room(habits, e.count() * gradient);
    e.reduced = buffers_.room(habits, own_count(e) * gradient);
    e.kept = buffers_.room(habits, own_count(e) * value);
    e.whole = buffers_.room(habits, e.count() * value);
  }
}

// The first ranks have one row more if the rows do not divide evenly.
std::int64_t GradientTrial::first_row(const Entry& e, int rank) const {
  return e.rows / n_ * rank + std::min<std::int64_t>(rank, e.rows % n_);
}
std::int64_t GradientTrial::own_from(const Entry& e) const { return first_row(e, me_) * e.columns; }
std::int64_t GradientTrial::own_count(const Entry& e) const {
  return first_row(e, me_ + 1) * e.columns - own_from(e);
}

// The call with the result of the reduction of a gradient.
Step GradientTrial::gradient_of(std::size_t i, int round) const {
  const Entry& e = entries_[i];
  Step s;
  s.op = Op::all_reduce;
  s.dtype = s_.gradients.cut ? gradient_dtype_ : e.dtype;
  s.reduce = s_.gradients.cut ? op_ : e.reduce;
  s.count = e.count();
  s.salt = mix(mix(s_.salt, i + 50), static_cast<std::uint64_t>(round));
  return s;
}

// The call with the result of gathering the values of a tensor.
Step GradientTrial::values_of(std::size_t i, int round) const {
  Step s = gradient_of(i, round);
  s.op = Op::broadcast;
  s.dtype = entries_[i].dtype;
  return s;
}

GradientTrial::Reduced GradientTrial::reduced(std::size_t i, int round) const {
  const Entry& e = entries_[i];
  Reduced r{.step = gradient_of(i, round)};
  r.step.count = e.local;
  const int place[] = {me_ / tp_, me_ % tp_}, size[] = {n_ / tp_, tp_};
  for (std::size_t a = 0; a < 2; ++a) {
    const auto here = static_cast<std::uint64_t>(place[a]);
    if (is_shard(e.placements[a])) r.step.salt = mix(r.step.salt, 1000 * (a + 1) + here);
    if (!is_partial(e.placements[a])) continue;
    r.me = r.me * size[a] + place[a];
    r.n *= size[a];
  }
  return r;
}

std::string GradientTrial::run(ProcessGroup& group, bool exact, const Meanwhile& meanwhile) {
  meanwhile.before_waiting();
  std::string wrong = s_.gradients.cut       ? cut(group, exact, meanwhile)
                      : s_.gradients.at_once ? at_once(group, exact, meanwhile)
                                             : in_buckets(group, exact, meanwhile);
  return wrong.empty() ? stray() : wrong;
}

#ifdef WEFT_HAVE_CHECKPOINT
std::string GradientTrial::in_buckets(ProcessGroup& group, bool exact, const Meanwhile& meanwhile) {
  const DeviceMesh mesh(group, {{"dp", n_}});
  std::vector<BucketEntry> list;
  for (const Entry& e : entries_) list.push_back({e.name, e.count(), e.dtype, {e.reduce}});
  BucketOptions options;
  options.bucket_bytes = bytes_;
  options.unused = unused_is_error_ ? Unused::error : Unused::zeros;
  BucketReducer reducer(mesh, list, options);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    if (e.bound) reducer.bind(i, {e.data, e.dtype, {}, Dims::line(e.count()), Dims::line(1)});
  }
  const auto gradient = [&](std::size_t i) {
    return entries_[i].bound ? entries_[i].data : reducer.slot(i).data;
  };
  Dice d(mix(s_.salt, static_cast<std::uint64_t>(me_) + 77));
  for (int round = 0; round < s_.gradients.rounds; ++round) {
    const auto compute = [&](std::size_t i) {
      const std::vector<std::byte> bytes = input(gradient_of(i, round), me_, 0, n_);
      if (!bytes.empty()) std::memcpy(gradient(i), bytes.data(), bytes.size());
    };
    std::vector<std::size_t> order(entries_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    shuffle(d, order);
    const bool accumulates = d.one_in(3);  // two micro-batches, of which the last gives some of the gradients
    std::size_t ready = order.size();
    if (accumulates) {
      const NoSync off = reducer.no_sync();
      for (const std::size_t i : order) {
        compute(i);
        reducer.ready(i);
      }
      ready = static_cast<std::size_t>(d.below(order.size() + 1));
    }
    for (std::size_t k = 0; k <= ready; ++k) {
      if (round + 1 == s_.gradients.rounds && k == ready / 2) meanwhile.in_flight();
      if (k == ready) break;
      if (!accumulates) compute(order[k]);
      reducer.ready(order[k]);
    }
    meanwhile.before_waiting();
    reducer.finish();
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Step e = gradient_of(i, round);
      if (const std::string wrong = compare(e, expected(e, 0, me_, n_, exact), gradient(i)); !wrong.empty())
        return fmt::format("gradients in buckets: round {}, \"{}\"{}: {}", round, entries_[i].name,
                           entries_[i].bound ? ", bound" : "", wrong);
    }
  }
  return {};
}

std::string GradientTrial::cut(ProcessGroup& group, bool exact, const Meanwhile& meanwhile) {
  const DeviceMesh mesh(group, {{"dp", n_}});
  std::vector<ShardEntry> list;
  std::vector<ConstTensorView> kept, gradients;
  std::vector<TensorView> wholes, reduced;
  for (const Entry& e : entries_) {
    const Shape shape{e.rows, e.columns}, part{own_count(e) / e.columns, e.columns};
    const Strides strides{e.columns, 1};
    list.push_back({e.name, make_layout(mesh, {Replicate{}}, shape), e.dtype});
    kept.push_back({e.kept, e.dtype, {}, part, strides});
    wholes.push_back({e.whole, e.dtype, {}, shape, strides});
    gradients.push_back({e.data, gradient_dtype_, {}, shape, strides});
    reduced.push_back({e.reduced, gradient_dtype_, {}, part, strides});
  }
  ShardedParametersOptions options;
  options.alone_bytes = bytes_;
  options.reduce = options.gradient = gradient_dtype_;
  ShardedParameters shards(mesh, list, options);
  for (int round = 0; round < s_.gradients.rounds; ++round) {
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Entry& e = entries_[i];
      const std::int64_t size = size_bytes(e.dtype);
      const std::vector<std::byte> values = input(values_of(i, round), 0, 0, n_),
                                   gradient = input(gradient_of(i, round), me_, 0, n_);
      std::copy_n(values.begin() + own_from(e) * size, own_count(e) * size, e.kept);
      std::copy(gradient.begin(), gradient.end(), e.data);
    }
    const bool last = round + 1 == s_.gradients.rounds;
    const bool early = mix(s_.salt, 32) % 2 == 0;
    Transfer gather = shards.start_unshard(kept, wholes);
    if (last && early) meanwhile.in_flight();
    Transfer reduce = shards.start_reduce_scatter(gradients, reduced, {op_});
    if (last && !early) meanwhile.in_flight();
    meanwhile.before_waiting();
    for (Transfer* t : {&gather, &reduce}) t->finish();
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Step e = values_of(i, round);
      if (const std::string wrong = compare(e, expected(e, 0, me_, n_, exact), entries_[i].whole);
          !wrong.empty())
        return fmt::format("sharded parameters: round {}, the whole of \"{}\": {}", round, entries_[i].name,
                           wrong);
      if (const std::string wrong = complaint_of_reduced(i, round, exact); !wrong.empty())
        return fmt::format("sharded parameters: round {}, the gradient of \"{}\": {}", round,
                           entries_[i].name, wrong);
    }
  }
  return {};
}

std::string GradientTrial::at_once(ProcessGroup& group, bool exact, const Meanwhile& meanwhile) {
  const DeviceMesh mesh(group, {{"dp", n_ / tp_}, {"tp", tp_}});
  for (int round = 0; round < s_.gradients.rounds; ++round) {
    std::vector<Gradient> list;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Entry& e = entries_[i];
      const Reduced r = reduced(i, round);
      const std::vector<std::byte> bytes = input(r.step, r.me, 0, r.n);
      if (!bytes.empty()) std::memcpy(e.data, bytes.data(), bytes.size());
      list.push_back({e.name,
                      {e.data, e.dtype, {}, Dims::line(e.local), Dims::line(1)},
                      make_layout(mesh, e.placements, {e.rows})});
    }
    if (round + 1 == s_.gradients.rounds) meanwhile.in_flight();
    meanwhile.before_waiting();
    reduce_gradients(list, mesh,
                     {.data_axes = mesh["dp"], .tolerance = odd_ ? std::optional(0.25) : std::nullopt});
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Reduced r = reduced(i, round);
      if (const std::string wrong = compare(r.step, expected(r.step, 0, r.me, r.n, exact), entries_[i].data);
          !wrong.empty())
        return fmt::format("gradients at once: round {}, \"{}\" as {}: {}", round, entries_[i].name,
                           to_string(*make_layout(mesh, entries_[i].placements, {entries_[i].rows})), wrong);
    }
  }
  return {};
}

#else
std::string GradientTrial::in_buckets(ProcessGroup&, bool, const Meanwhile&) {
  return "weft was built without its layers dp and checkpoint";
}
std::string GradientTrial::cut(ProcessGroup& group, bool exact, const Meanwhile& meanwhile) {
  return in_buckets(group, exact, meanwhile);
}
std::string GradientTrial::at_once(ProcessGroup& group, bool exact, const Meanwhile& meanwhile) {
  return in_buckets(group, exact, meanwhile);
}
#endif

// Checks this rank's part of a sharded gradient; and the gradient that it passed, which is only read.
std::string GradientTrial::complaint_of_reduced(std::size_t i, int round, bool exact) const {
  const Entry& e = entries_[i];
  const Step s = gradient_of(i, round);
  const std::vector<std::byte> gave = input(s, me_, 0, n_);
  if (!std::equal(gave.begin(), gave.end(), e.data)) return "what this rank gave was changed";
  Expected all = expected(s, 0, me_, n_, exact), own;
  const std::int64_t size = size_bytes(s.dtype), from = own_from(e), count = own_count(e);
  own.bytes.assign(all.bytes.begin() + from * size, all.bytes.begin() + (from + count) * size);
  if (!all.slack.empty()) own.slack.assign(all.slack.begin() + from, all.slack.begin() + from + count);
  return compare(s, own, e.reduced);
}

std::string GradientTrial::stray() const {
  Buffers::Marks marks(buffers_);
  for (const Entry& e : entries_) {
    const std::int64_t value = size_bytes(e.dtype), gradient = size_bytes(gradient_dtype_);
    if (!s_.gradients.cut) {
      if (e.bound) marks.mark(e.data, (s_.gradients.at_once ? e.local : e.count()) * value);
      continue;
    }
    marks.mark(e.data, e.count() * gradient);
    marks.mark(e.reduced, own_count(e) * gradient);
    marks.mark(e.kept, own_count(e) * value);
    marks.mark(e.whole, e.count() * value);
  }
  return marks.stray();
}

}  // namespace weft::check
