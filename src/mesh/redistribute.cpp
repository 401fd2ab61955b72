// The plan of steps from one layout to another, and the class that carries it out.
#include "weft/mesh/redistribute.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "backends/layout_tag.hpp"
#include "base/hash.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/layout_table.hpp"
#include "mesh/moves.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"
#include "weft/host/copy.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {

namespace {

struct RedistributeStep {
  enum class Kind : unsigned char { slice, gather, reduce_scatter, exchange, all_reduce, contribute };
  Kind kind;
  DeviceMesh axes;
  int dim = 0, from_dim = 0;
  Cut cut{}, from_cut{};
  ReduceOp op = ReduceOp::sum;

  bool communicates() const noexcept { return kind != Kind::slice && kind != Kind::contribute; }
  Move start(const Tensor& in, int tag) const {
    switch (kind) {
      case Kind::slice: return Moves::slice(in, axes, dim, cut);
      case Kind::gather: return Moves::gather(in, axes, dim, cut, tag);
      case Kind::reduce_scatter: return Moves::reduce_scatter(in, axes, dim, cut, op, tag);
      case Kind::exchange: return Moves::exchange(in, axes, from_dim, from_cut, dim, cut, tag);
      case Kind::all_reduce: return Moves::all_reduce(in, axes, op, tag);
      case Kind::contribute: return Moves::contribute(in, axes, op);
    }
    return {};
  }
};

/// First, from the innermost axis out, every dimension that is sharded and must not stay so is gathered.
/// Then, from the outermost axis in, every dimension that must be sharded is sliced, reduce-scattered or
/// exchanged. Then, on the smallest parts, the remaining partial sums are reduced. Last, tensors that must be
/// partial are made partial.
class Planner {
 public:
  Planner(const Layout& from, const Layout& to)
      : root_(from.mesh()), mesh_(root_.shape()), from_(from), to_(to), now_(from) {
    coordinates_ = mesh_.coordinates(root_.rank());
    find_touched();
  }

  std::deque<RedistributeStep> plan() {
    for (auto a = from_.nesting.rbegin(); a != from_.nesting.rend(); ++a) gather(*a);
    // From here on sharded axes nest as in the target layout, and gathered axes no longer count.
    now_.nesting = to_.nesting;
    for (const int a : to_.nesting) cut(a);
    for (int a = 0; a < mesh_.axis_count(); ++a) reduce(a);
    for (int a = 0; a < mesh_.axis_count(); ++a)
      if (touched(a) && is_partial(goal(a)))
        steps_.push_back(
            {RedistributeStep::Kind::contribute, axis(a), 0, 0, {}, {}, std::get<Partial>(goal(a)).op});
    return std::move(steps_);
  }

 private:
  const Placement& goal(int a) const { return to_.placements[static_cast<std::size_t>(a)]; }
  Placement& now(int a) { return now_.placements[static_cast<std::size_t>(a)]; }
  bool touched(int a) const { return touched_[static_cast<std::size_t>(a)]; }
  DeviceMesh axis(int a) const { return root_[mesh_.name(a)]; }

  /// The axes that shard a dimension, outermost first.
  std::vector<int> cutting(const LayoutSpec& spec, int dim) const {
    std::vector<int> axes;
    for (const int a : spec.nesting)
      if (mesh_.size(a) > 1 && is_shard(spec.placements[static_cast<std::size_t>(a)], dim)) axes.push_back(a);
    return axes;
  }

  /// An axis is touched if its placement changes, or if another axis than before is outside it in its
  /// dimension.
  void find_touched() {
    touched_.assign(static_cast<std::size_t>(mesh_.axis_count()), false);
    for (int a = 0; a < mesh_.axis_count(); ++a)
      touched_[static_cast<std::size_t>(a)] =
          mesh_.size(a) > 1 && from_.placements[static_cast<std::size_t>(a)] != goal(a);
    for (int dim = 0; dim < from_.global.rank(); ++dim) {
      const std::vector<int> before = cutting(from_, dim), after = cutting(to_, dim);
      const auto [b, e] = std::mismatch(before.begin(), before.end(), after.begin(), after.end());
      for (auto i = b; i != before.end(); ++i) touched_[static_cast<std::size_t>(*i)] = true;
      for (auto i = e; i != after.end(); ++i) touched_[static_cast<std::size_t>(*i)] = true;
    }
  }

  /// Axis a moves from one dimension to another, is the innermost in both, and nothing else changes in either
  /// dimension.
  bool exchangeable(int a) const {
    const Shard* const before = std::get_if<Shard>(&from_.placements[static_cast<std::size_t>(a)]);
    const Shard* const after = std::get_if<Shard>(&goal(a));
    if (before == nullptr || after == nullptr || *before == *after) return false;
    const auto differ_by_a = [&](const LayoutSpec& shorter, const LayoutSpec& longer, int dim) {
      std::vector<int> axes = cutting(shorter, dim);
      axes.push_back(a);
      return axes == cutting(longer, dim);
    };
    return differ_by_a(to_, from_, before->dim) && differ_by_a(from_, to_, after->dim);
  }

  /// How axis a shards a dimension that the other axes shard as they do now.
  Cut cut_by(int a, int dim) const {
    Cut cut{{}, mesh_.size(a)};
    for (const Chunk& run : runs_of(now_, mesh_, coordinates_, dim, a)) cut.segments.push_back(run.size);
    return cut;
  }

  void gather(int a) {
    if (!touched(a) || !is_shard(now(a)) || exchangeable(a)) return;
    const int dim = std::get<Shard>(now(a)).dim;
    steps_.push_back({RedistributeStep::Kind::gather, axis(a), dim, 0, cut_by(a, dim), {}, {}});
    now(a) = Replicate{};
  }

  void cut(int a) {
    if (!touched(a) || !is_shard(goal(a))) return;
    const int dim = std::get<Shard>(goal(a)).dim;
    RedistributeStep step{RedistributeStep::Kind::slice, axis(a), dim, 0, cut_by(a, dim), {}, {}};
    if (const Shard* const shard = std::get_if<Shard>(&now(a))) {
      step.kind = RedistributeStep::Kind::exchange;
      step.from_dim = shard->dim;
      step.from_cut = cut_by(a, shard->dim);
    } else if (const Partial* const partial = std::get_if<Partial>(&now(a))) {
      step.kind = RedistributeStep::Kind::reduce_scatter;
      step.op = partial->op;
    }
    now(a) = goal(a);
    steps_.push_back(std::move(step));
  }

  void reduce(int a) {
    if (!touched(a) || !is_partial(now(a))) return;
    const Placement partial = now(a);
    std::vector<std::string> names;
    for (int b = a; b < mesh_.axis_count(); ++b) {
      if (!touched(b) || now(b) != partial) continue;
      names.push_back(mesh_.name(b));
      now(b) = Replicate{};
    }
    steps_.push_back({RedistributeStep::Kind::all_reduce,
                      root_.submesh(names),
                      0,
                      0,
                      {},
                      {},
                      std::get<Partial>(partial).op});
  }

  const DeviceMesh root_;
  const MeshShape& mesh_;
  const Layout& from_;
  const Layout& to_;
  LayoutSpec now_;
  std::vector<int> coordinates_;
  std::vector<bool> touched_;
  std::deque<RedistributeStep> steps_;
};

/// The steps of a redistribution. Each step waits for the previous one. Ranks that pass different layouts may
/// call collectives with equal counts. So each collective has a tag that identifies its layouts, and the
/// group compares the tag together with the call.
class Redistribution final : public Transfer::Steps {
 public:
  Redistribution(Tensor in, const LayoutRef& to)
      : steps_(Planner(*in.layout(), *to).plan()),
        from_(in.layout()),
        to_(to),
        tag_(steps_.empty() ? 0 : tag_of(*from_, *to)),
        move_(std::move(in)) {
    while (!steps_.empty() && !communicates_) next();
  }

  bool done() override {
    return in_words([this] { return move_.done(); });
  }
  Tensor finish() override {
    while (!steps_.empty()) next();
    return in_words([this] { return move_.finish(); }).with_layout(to_);
  }

 private:
  static int tag_of(const Layout& from, const Layout& to) {
    Fnv1a hash;
    add_to(hash, from);
    add_to(hash, to);
    return layout_tag(hash.value);
  }

  void next() {
    const Tensor x = in_words([this] { return move_.finish(); });
    move_ = Move();
    const RedistributeStep step = std::move(steps_.front());
    steps_.pop_front();
    communicates_ = communicates_ || step.communicates();
    move_ = in_words([&] { return step.start(x, tag_ - static_cast<int>(steps_.size())); });
  }

  /// The result of f(). Rewrites a mismatch of calls so that it says which layouts this rank passed.
  template <class F>
  auto in_words(const F& f) -> decltype(f()) {
    try {
      return f();
    } catch (const Error& e) {
      if (e.code() != ErrorCode::mismatch) throw;
      throw Error(Failure{.code = e.code(),
                          .text = fmt::format("redistribute: {} to {} on this rank: {}", to_string(*from_),
                                              to_string(*to_), e.what()),
                          .op = e.op(),
                          .call = e.call(),
                          .ranks = std::vector<int>(e.ranks().begin(), e.ranks().end())},
                  e.quiesced());
    }
  }

  std::deque<RedistributeStep> steps_;  // not begun
  LayoutRef from_, to_;
  int tag_;                    // of the last step; one less for each before it
  bool communicates_ = false;  // a step that was begun does
  Move move_;
};

const Layout& stated(const Tensor& in) {
  if (in.layout() == nullptr)
    throw Error(
        ErrorCode::layout,
        fmt::format(
            "redistribute: the tensor {} is plain; give it a layout, which says what part of the whole it is",
            to_string(in.shape())));
  const Layout& layout = *in.layout();
  if (!(in.shape() == layout.local_shape()))  // with_layout() states without a check
    throw Error(ErrorCode::layout,
                fmt::format("redistribute: the tensor is {}; rank {} of {} holds {}", to_string(in.shape()),
                            layout.mesh().rank(), to_string(layout), to_string(layout.local_shape())));
  if (!in && in.count() > 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("redistribute: the tensor {} has no memory: it is empty or was moved from",
                            to_string(in.shape())));
  return layout;
}

/// Throws layout if no contributions can combine to the value.
void expect_contributions(const Layout& from, const Layout& to) {
  const auto possible = [](ReduceOp op) {
    return op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::min || op == ReduceOp::max;
  };
  const MeshShape& mesh = to.mesh_shape();
  for (int a = 0; a < mesh.axis_count(); ++a) {
    const Placement& goal = to.placements[static_cast<std::size_t>(a)];
    const Partial* const partial = std::get_if<Partial>(&goal);
    if (partial == nullptr || possible(partial->op) || mesh.size(a) == 1 ||
        from.placements[static_cast<std::size_t>(a)] == goal)
      continue;
    throw Error(ErrorCode::layout,
                fmt::format("redistribute: to {} on {}={}; expected a sum, avg, min or max, of which a value "
                            "can be made contributions",
                            to_string(goal), mesh.name(a), mesh.size(a)));
  }
}

/// A transfer whose result goes to the caller's memory.
class IntoMemory final : public Transfer::Steps {
 public:
  IntoMemory(Transfer transfer, Context& context, Tensor out)
      : context_(context), out_(std::move(out)), transfer_(std::move(transfer)) {}

  bool done() override { return transfer_.done(); }
  Tensor finish() override {
    const Tensor result = transfer_.finish();
    if (result.count() > 0 && result.data() != out_.data())
      copy(context_, result.view(), out_.view(), out_.stream());
    return out_;
  }

 private:
  Context& context_;
  Tensor out_;
  Transfer transfer_;
};

/// A tensor that borrows the caller's memory; `which` names the tensor in errors.
Tensor borrowed(const char* which, const ConstTensorView& v, const LayoutRef& layout, Stream stream) {
  if (layout == nullptr)
    throw Error(ErrorCode::bad_argument, fmt::format("redistribute: the layout of {} is null", which));
  if (const std::string fault = memory_fault(v); !fault.empty())
    throw Error(ErrorCode::bad_argument, fmt::format("redistribute: {} {}", which, fault));
  if (!(v.shape == layout->local_shape()))
    throw Error(ErrorCode::layout,
                fmt::format("redistribute: {} is {}; rank {} of {} holds {}", which, to_string(v.shape),
                            layout->mesh().rank(), to_string(*layout), to_string(layout->local_shape())));
  return Tensor(Storage::borrow(const_cast<std::byte*>(v.data), static_cast<std::size_t>(v.bytes()), stream),
                0, v.shape, v.dtype)
      .with_layout(layout);
}

}  // namespace

Transfer start_redistribute(const ConstTensorView& in, const LayoutRef& from, const TensorView& out,
                            const LayoutRef& to, Stream stream) {
  if (stream == Stream{}) stream = in.device;
  const auto bad = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "redistribute: " + text);
  };
  const Tensor source = borrowed("in", in, from, stream), target = borrowed("out", out, to, stream);
  if (in.dtype != out.dtype)
    bad(fmt::format("out is {}; expected {} as in", name(out.dtype), name(in.dtype)));
  if (in.device != stream.device) bad("in " + is_on(in.device, stream.device));
  if (out.device != stream.device) bad("out " + is_on(out.device, stream.device));
  if (overlap(in, out) && in.data != out.data)
    bad("in and out overlap; expected disjoint memory, or the same first address");
  return Transfer(
      std::make_unique<IntoMemory>(start_redistribute(source, to), from->mesh().context(), target));
}

void redistribute(const ConstTensorView& in, const LayoutRef& from, const TensorView& out,
                  const LayoutRef& to, Stream stream) {
  start_redistribute(in, from, out, to, stream).finish();
}

Transfer start_redistribute(const Tensor& in, const LayoutRef& to) {
  const Layout& from = stated(in);
  if (to == in.layout()) return Transfer(in);
  if (to == nullptr || !(to->mesh() == from.mesh()) || !(to->global == from.global) ||
      !(to->segments == from.segments))
    throw Error(ErrorCode::layout,
                fmt::format("redistribute: from {} to {}; expected the same mesh, shape and segments",
                            to_string(from), to == nullptr ? "no layout" : to_string(*to)));
  expect_contributions(from, *to);
  return Transfer(std::make_unique<Redistribution>(in, to));
}

Transfer start_redistribute(const Tensor& in, const Placements& to) {
  return start_redistribute(in, stated(in).with(to));
}
Transfer start_redistribute(const Tensor& in, const DeviceMesh& axes, const Placement& to) {
  return start_redistribute(in, stated(in).with(given_mesh("redistribute", axes), to));
}

Tensor redistribute(const Tensor& in, const LayoutRef& to) { return start_redistribute(in, to).finish(); }
Tensor redistribute(const Tensor& in, const Placements& to) { return start_redistribute(in, to).finish(); }
Tensor redistribute(const Tensor& in, const DeviceMesh& axes, const Placement& to) {
  return start_redistribute(in, axes, to).finish();
}

Tensor full(const Tensor& in) {
  if (in.layout() == nullptr) return in;
  return redistribute(in, Placements(in.layout()->placements.size(), Replicate{})).with_layout(nullptr);
}

Tensor distribute(const Tensor& whole, const LayoutRef& layout) {
  if (layout == nullptr)
    throw Error(ErrorCode::bad_argument, "distribute: layout is null; expected the layout of the result");
  if (whole.shape() != layout->global)
    throw Error(ErrorCode::layout, fmt::format("distribute: the tensor is {}; expected the whole of {}",
                                               to_string(whole.shape()), to_string(*layout)));
  return redistribute(whole.with_layout(layout->with(Placements(layout->placements.size(), Replicate{}))),
                      layout);
}

}  // namespace weft
