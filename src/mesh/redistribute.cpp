// The steps between layouts, one axis at a time, and the plan that orders them.
#include "weft/mesh/redistribute.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "mesh/mesh_state.hpp"
#include "mesh/slab.hpp"
#include "weft/base/error.hpp"

namespace weft {

namespace {

/// Tag of the exchanges here, at the far end of the tags so that a program's own small ones do not meet it.
constexpr int kExchangeTag = 0x7fffffff;

/// A tensor on its way: what this rank holds, and the layout that it has by now.
struct Step {
  Tensor local;
  LayoutRef layout;
};

Tensor shared_tensor(Context& context, const Shape& shape, DType dtype) {
  return {context, shape, dtype, Memory::shared};
}

TensorView flat(std::byte* data, std::int64_t count, DType dtype) {
  return {data, dtype, {}, Dims::line(count), Dims::line(1)};
}

Shape resized(Shape shape, int dim, std::int64_t size) {
  shape[dim] = size;
  return shape;
}

/// Rows [chunk.offset, + chunk.size) of dimension `dim`, as a tensor of its own.
Tensor cut(Context& context, const Tensor& in, int dim, Chunk chunk, Memory memory) {
  Tensor out(context, resized(in.shape(), dim, chunk.size), in.dtype(), memory);
  copy_slab(fold(in.shape(), dim, in.dtype()), chunk.size, {in.data(), in.size(dim), chunk.offset},
            {out.data(), chunk.size, 0});
  return out;
}

/// Replicate → Shard(dim).
Tensor slice(const Tensor& in, const DeviceMesh& axis, int dim) {
  return cut(axis.context(), in, dim, chunk_of(in.size(dim), axis.size(), axis.rank()),
             in.storage().memory());
}

/// Shard(dim) → Replicate, `whole` being the shape afterwards. Every rank contributes a block as long as the
/// longest part: its part, then padding that nobody reads. The blocks of all ranks arrive one after the
/// other; each part is then put to its place. Where dim is outermost and the parts are equal, the blocks
/// already are the whole.
Tensor gather(const Tensor& in, const DeviceMesh& axis, int dim, const Shape& whole) {
  Tensor out = shared_tensor(axis.context(), whole, in.dtype());
  if (whole.count() == 0) return out;
  const int n = axis.size();
  const Fold f = fold(whole, dim, in.dtype());
  const std::int64_t longest = chunk_of(whole[dim], n, 0).size;
  const std::int64_t block_count = whole.count() / whole[dim] * longest;  // elements
  const std::int64_t block_bytes = block_count * size_bytes(in.dtype());
  const bool in_place = f.outer == 1 && whole[dim] % n == 0;

  const Tensor blocks =
      in_place ? out : shared_tensor(axis.context(), Dims::line(n * block_count), in.dtype());
  std::byte* mine = blocks.data() + axis.rank() * block_bytes;
  copy_slab(f, in.size(dim), {in.data(), in.size(dim), 0}, {mine, longest, 0});
  clear_slab(f, longest - in.size(dim), {mine, longest, in.size(dim)});
  axis.group()
      .all_gather(flat(mine, block_count, in.dtype()), flat(blocks.data(), n * block_count, in.dtype()))
      .wait();
  if (in_place) return out;
  for (int r = 0; r < n; ++r) {
    const Chunk part = chunk_of(whole[dim], n, r);
    copy_slab(f, part.size, {blocks.data() + r * block_bytes, longest, 0},
              {out.data(), whole[dim], part.offset});
  }
  return out;
}

/// Partial(op) → Replicate.
Tensor all_reduce(const Tensor& in, ProcessGroup& group, ReduceOp op) {
  Tensor out = shared_tensor(group.context(), in.shape(), in.dtype());
  if (in.count() == 0) return out;
  CallOptions options;
  options.op = op;
  if (in.storage().memory() == Memory::shared) {
    group.all_reduce(in, out, options).wait();
  } else {
    std::memcpy(out.data(), in.data(), static_cast<std::size_t>(in.bytes()));
    group.all_reduce(out, out, options).wait();
  }
  return out;
}

/// Partial(op) → Shard(dim): the mirror image of gather. The parts are laid out one after the other, each
/// padded to a block as long as the longest; each rank receives its block reduced and drops the padding.
Tensor reduce_scatter(const Tensor& in, const DeviceMesh& axis, int dim, ReduceOp op) {
  const int n = axis.size();
  const Fold f = fold(in.shape(), dim, in.dtype());
  const std::int64_t longest = chunk_of(in.size(dim), n, 0).size;
  const Chunk mine = chunk_of(in.size(dim), n, axis.rank());
  Tensor out = shared_tensor(axis.context(), resized(in.shape(), dim, longest), in.dtype());
  if (in.count() == 0) return cut(axis.context(), out, dim, {0, mine.size}, Memory::shared);
  const std::int64_t block_count = out.count();

  const bool in_place = f.outer == 1 && in.size(dim) % n == 0 && in.storage().memory() == Memory::shared;
  const Tensor blocks =
      in_place ? in : shared_tensor(axis.context(), Dims::line(n * block_count), in.dtype());
  if (!in_place) {
    for (int r = 0; r < n; ++r) {
      const Chunk part = chunk_of(in.size(dim), n, r);
      std::byte* block = blocks.data() + r * block_count * size_bytes(in.dtype());
      copy_slab(f, part.size, {in.data(), in.size(dim), part.offset}, {block, longest, 0});
      clear_slab(f, longest - part.size, {block, longest, part.size});
    }
  }
  CallOptions options;
  options.op = op;
  axis.group().reduce_scatter(flat(blocks.data(), n * block_count, in.dtype()), out, options).wait();
  return mine.size == longest ? out : cut(axis.context(), out, dim, {0, mine.size}, Memory::shared);
}

/// Shard(from_dim) → Shard(to_dim), without ever holding the whole. Of what this rank has, part p along
/// to_dim belongs to rank p; what rank p sends in return is part p along from_dim of what this rank will
/// have. Both sides know the sizes, so empty blocks are not sent. `whole_from`: the size of from_dim over all
/// ranks of the axis.
Tensor exchange(const Tensor& in, const DeviceMesh& axis, int from_dim, int to_dim, std::int64_t whole_from) {
  const int n = axis.size();
  const int me = axis.rank();
  Context& context = axis.context();
  const Chunk kept = chunk_of(in.size(to_dim), n, me);
  Tensor out = shared_tensor(context, resized(resized(in.shape(), to_dim, kept.size), from_dim, whole_from),
                             in.dtype());

  std::vector<Tensor> sent(static_cast<std::size_t>(n)), received(static_cast<std::size_t>(n));
  std::vector<Work> works;  // after the buffers, so that it goes before them
  CallOptions options;
  options.tag = kExchangeTag;
  for (int step = 1; step < n; ++step) {  // each rank begins with another peer
    const int from = (me + n - step) % n, to = (me + step) % n;
    Tensor& r = received[static_cast<std::size_t>(from)] = shared_tensor(
        context, resized(out.shape(), from_dim, chunk_of(whole_from, n, from).size), in.dtype());
    Tensor& s = sent[static_cast<std::size_t>(to)] =
        cut(context, in, to_dim, chunk_of(in.size(to_dim), n, to), Memory::shared);
    if (r.count() > 0) works.push_back(axis.group().recv(r, from, options));
    if (s.count() > 0) works.push_back(axis.group().send(s, to, options));
  }
  received[static_cast<std::size_t>(me)] = cut(context, in, to_dim, kept, Memory::local);
  for (Work& w : works) w.wait();
  for (int p = 0; p < n; ++p) {
    const Tensor& block = received[static_cast<std::size_t>(p)];
    const Chunk part = chunk_of(whole_from, n, p);
    copy_slab(fold(out.shape(), from_dim, in.dtype()), part.size, {block.data(), part.size, 0},
              {out.data(), whole_from, part.offset});
  }
  return out;
}

/// Replicate → Partial(op): contributions that combine to the value. Averages, minima and maxima of equal
/// values are that value.
Tensor contribute(const Tensor& in, const DeviceMesh& axis, ReduceOp op) {
  if (op != ReduceOp::sum || axis.rank() == 0) return in;
  return Tensor::zeros(axis.context(), in.shape(), in.dtype(), in.storage().memory());
}

/// The axes whose placement must be touched to get from one list of placements to the other: those where they
/// differ, and those nested inside a dimension that an axis left of them stops or begins to shard. Axes of
/// one rank never need a step.
std::vector<bool> touched_axes(const MeshShape& mesh, const Placements& from, const Placements& to) {
  std::vector<bool> touched(from.size(), false);
  for (std::size_t a = 0; a < from.size(); ++a) {
    if (mesh.size(static_cast<int>(a)) == 1) continue;
    touched[a] = touched[a] || from[a] != to[a];
    if (!touched[a]) continue;
    for (std::size_t inner = a + 1; inner < from.size(); ++inner)
      if (is_shard(from[inner]) && (from[inner] == from[a] || from[inner] == to[a]) &&
          mesh.size(static_cast<int>(inner)) > 1)
        touched[inner] = true;
  }
  return touched;
}

/// Axis a goes from one sharded dimension to another and no other axis shards either.
bool exchangeable(const MeshShape& mesh, const Placements& from, const Placements& to, std::size_t a) {
  if (!is_shard(from[a]) || !is_shard(to[a]) || from[a] == to[a]) return false;
  for (std::size_t b = 0; b < from.size(); ++b)
    if (b != a && mesh.size(static_cast<int>(b)) > 1 &&
        (from[b] == from[a] || from[b] == to[a] || to[b] == from[a] || to[b] == to[a]))
      return false;
  return true;
}

}  // namespace

// First, from the innermost axis out, what is sharded and must not stay so is gathered. Then, from the
// outermost axis in, what is to be sharded is cut: sliced, reduce-scattered or exchanged; this order is the
// order of nesting. Then, on parts as small as they get, the remaining partial sums are reduced. Last, what
// is to be partial becomes so.
Tensor redistribute(const Tensor& in, const Placements& to) {
  if (in.layout() == nullptr)
    throw Error(ErrorCode::layout,
                fmt::format("redistribute: the tensor {} is plain; state its layout first (as_layout)",
                            to_string(in.shape())));
  const LayoutRef goal = in.layout()->with(to);
  if (goal == in.layout()) return in;
  const DeviceMesh root = in.layout()->mesh();
  const MeshShape& mesh = root.shape();
  const Placements& from = in.layout()->placements;
  const std::vector<bool> touched = touched_axes(mesh, from, to);
  const auto axis = [&](std::size_t a) { return root[mesh.name(static_cast<int>(a))]; };

  Placements now = from;
  Tensor x = in;
  for (std::size_t a = now.size(); a-- > 0;) {
    if (!touched[a] || !is_shard(now[a]) || exchangeable(mesh, from, to, a)) continue;
    const int dim = std::get<Shard>(now[a]).dim;
    now[a] = Replicate{};
    x = gather(x, axis(a), dim, in.layout()->with(now)->local_shape());
  }
  for (std::size_t a = 0; a < now.size(); ++a) {
    if (!touched[a] || !is_shard(to[a])) continue;
    const int dim = std::get<Shard>(to[a]).dim;
    if (const Shard* shard = std::get_if<Shard>(&now[a])) {
      Placements without = now;
      without[a] = Replicate{};
      x = exchange(x, axis(a), shard->dim, dim, in.layout()->with(without)->local_shape()[shard->dim]);
    } else if (const Partial* partial = std::get_if<Partial>(&now[a])) {
      x = reduce_scatter(x, axis(a), dim, partial->op);
    } else {
      x = slice(x, axis(a), dim);
    }
    now[a] = to[a];
  }
  for (std::size_t a = 0; a < now.size(); ++a) {
    if (!touched[a] || !is_partial(now[a])) continue;
    const Placement partial = now[a];
    std::vector<std::string> names;
    for (std::size_t b = a; b < now.size(); ++b) {
      if (!touched[b] || now[b] != partial) continue;
      names.push_back(mesh.name(static_cast<int>(b)));
      now[b] = Replicate{};
    }
    x = all_reduce(x, root.submesh(names).group(), std::get<Partial>(partial).op);
  }
  for (std::size_t a = 0; a < now.size(); ++a)
    if (touched[a] && is_partial(to[a])) x = contribute(x, axis(a), std::get<Partial>(to[a]).op);
  return x.with_layout(goal);
}

Tensor redistribute(const Tensor& in, const DeviceMesh& axis, const Placement& to) {
  if (in.layout() == nullptr) return redistribute(in, Placements{to});  // says so
  return redistribute(in, in.layout()->with(axis, to)->placements);
}

Tensor full(const Tensor& in) {
  if (in.layout() == nullptr) return in;
  return redistribute(in, Placements(in.layout()->placements.size(), Replicate{})).with_layout(nullptr);
}

Tensor distribute(const Tensor& whole, LayoutRef layout) {
  if (whole.shape() != layout->global)
    throw Error(ErrorCode::layout, fmt::format("distribute: the tensor is {}; expected the whole of {}",
                                               to_string(whole.shape()), to_string(*layout)));
  return redistribute(whole.with_layout(layout->with(Placements(layout->placements.size(), Replicate{}))),
                      layout->placements);
}

}  // namespace weft
