#include "mesh/moves.hpp"

#include "mesh/slab.hpp"
#include "weft/host/copy.hpp"

namespace weft {

namespace {

/// A tensor on the device of `like`, in memory that collectives work on in place.
Tensor shared_tensor(Context& context, const Shape& shape, const Tensor& like) {
  return {context, shape, like.dtype(), Memory::shared, like.stream()};
}

/// Elements of `of`, from `at` on.
TensorView flat(const Tensor& of, std::int64_t at, std::int64_t count) {
  return {of.data() + at * size_bytes(of.dtype()), of.dtype(), of.device(), Dims::line(count), Dims::line(1)};
}

/// A call on a device waits for what the tensors' stream was given before it.
CallOptions options_of(const Tensor& t, int tag, ReduceOp op = ReduceOp::sum) {
  CallOptions options;
  options.op = op;
  options.tag = tag;
  options.stream = t.stream();
  return options;
}

Shape resized(Shape shape, int dim, std::int64_t size) {
  shape[dim] = size;
  return shape;
}

/// Copies the part of `rank` out of a tensor that is whole in `dim`, to memory of its own (`extent` long in dim).
void take_part(const Mover& mover, const Fold& f, const Cut& cut, int rank, const std::byte* whole,
               std::byte* part, std::int64_t extent) {
  cut.for_each_run(rank, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t length) {
    copy_slab(mover, f, length, {whole, cut.whole(), in_whole}, {part, extent, in_part});
  });
}

/// Copies it back.
void put_part(const Mover& mover, const Fold& f, const Cut& cut, int rank, const std::byte* part,
              std::int64_t extent, std::byte* whole) {
  cut.for_each_run(rank, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t length) {
    copy_slab(mover, f, length, {part, extent, in_part}, {whole, cut.whole(), in_whole});
  });
}

Tensor part_of(const Tensor& in, Context& context, int dim, const Cut& cut, int rank, Memory memory) {
  Tensor out(context, resized(in.shape(), dim, cut.size(rank)), in.dtype(), memory, in.stream());
  take_part(Mover(context, in), fold(in.shape(), dim, in.dtype()), cut, rank, in.data(), out.data(),
            cut.size(rank));
  return out;
}

}  // namespace

Move Moves::slice(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut) {
  return Move(part_of(in, axis.context(), dim, cut, axis.rank(), in.storage().memory()));
}

// Every rank contributes a block as long as the longest part: its part, then padding that nobody reads. The
// blocks of all ranks arrive one after the other. Where dim is outermost and the parts are equal, the blocks
// already are the whole; else finish() puts each part to its place.
Move Moves::gather(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut, int tag) {
  Move move;
  move.out_ = shared_tensor(axis.context(), resized(in.shape(), dim, cut.whole()), in);
  if (move.out_.count() == 0) return move;
  const Fold f = fold(in.shape(), dim, in.dtype());
  const std::int64_t longest = cut.size(0);
  const std::int64_t count = move.out_.count() / cut.whole() * longest;  // elements of a block
  const bool in_place = f.outer == 1 && cut.even();
  move.blocks_ = in_place ? move.out_ : shared_tensor(axis.context(), Dims::line(axis.size() * count), in);
  const TensorView mine = flat(move.blocks_, axis.rank() * count, count);
  const Mover mover(axis.context(), in);
  copy_slab(mover, f, in.size(dim), {in.data(), in.size(dim), 0}, {mine.data, longest, 0});
  clear_slab(mover, f, longest - in.size(dim), {mine.data, longest, in.size(dim)});
  if (!in_place) {
    move.axis_ = axis;
    move.cut_ = cut;
    move.dim_ = dim;
    move.after_ = Move::After::unpack_gathered;
  }
  move.work_ = axis.group().all_gather(mine, flat(move.blocks_, 0, axis.size() * count), options_of(in, tag));
  return move;
}

// The mirror image of gather: the parts are laid out one after the other, each padded to a block as long as the
// longest; each rank receives its block reduced and drops the padding.
Move Moves::reduce_scatter(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut, ReduceOp op,
                           int tag) {
  Move move;
  const Fold f = fold(in.shape(), dim, in.dtype());
  const std::int64_t longest = cut.size(0), own = cut.size(axis.rank());
  move.out_ = shared_tensor(axis.context(), resized(in.shape(), dim, longest), in);
  if (own < longest) {
    move.dim_ = dim;
    move.axis_ = axis;
    move.cut_ = cut;
    move.after_ = Move::After::drop_padding;
  }
  if (in.count() == 0) return move;
  const std::int64_t count = move.out_.count();
  const bool in_place = f.outer == 1 && cut.even() && in.storage().direct();
  move.blocks_ = in_place ? in : shared_tensor(axis.context(), Dims::line(axis.size() * count), in);
  const Mover mover(axis.context(), in);
  for (int r = 0; r < axis.size() && !in_place; ++r) {
    std::byte* const block = flat(move.blocks_, r * count, count).data;
    take_part(mover, f, cut, r, in.data(), block, longest);
    clear_slab(mover, f, longest - cut.size(r), {block, longest, cut.size(r)});
  }
  move.work_ = axis.group().reduce_scatter(flat(move.blocks_, 0, axis.size() * count), move.out_,
                                           options_of(in, tag, op));
  return move;
}

// This rank cuts its tensor along `to` and sends part p to rank p. What rank p sends back is part p along `from`
// of this rank's result. Both sides know the sizes.
Move Moves::exchange(const Tensor& in, const DeviceMesh& axis, int from, const Cut& from_cut, int to,
                     const Cut& to_cut, int tag) {
  const int n = axis.size();
  Move move;
  move.out_ = shared_tensor(
      axis.context(), resized(resized(in.shape(), to, to_cut.size(axis.rank())), from, from_cut.whole()), in);
  move.in_ = shared_tensor(axis.context(), Dims::line(in.count()), in);
  move.blocks_ = shared_tensor(axis.context(), Dims::line(move.out_.count()), in);
  const Fold f = fold(in.shape(), to, in.dtype());
  std::vector<std::int64_t> sent(static_cast<std::size_t>(n)), received(sent);
  const Mover mover(axis.context(), in);
  std::byte* next = move.in_.data();
  for (int r = 0; r < n; ++r) {
    const std::int64_t count = resized(in.shape(), to, to_cut.size(r)).count();
    take_part(mover, f, to_cut, r, in.data(), next, to_cut.size(r));
    next += count * size_bytes(in.dtype());
    sent[static_cast<std::size_t>(r)] = count;
    received[static_cast<std::size_t>(r)] = resized(move.out_.shape(), from, from_cut.size(r)).count();
  }
  move.axis_ = axis;
  move.cut_ = from_cut;
  move.dim_ = from;
  move.after_ = Move::After::unpack_exchanged;
  move.work_ = axis.group().all_to_all_v(move.in_, {sent}, move.blocks_, {received}, options_of(in, tag));
  return move;
}

Move Moves::all_reduce(const Tensor& in, const DeviceMesh& axes, ReduceOp op, int tag) {
  Move move;
  move.out_ = shared_tensor(axes.context(), in.shape(), in);
  if (in.count() == 0) return move;
  const CallOptions options = options_of(in, tag, op);
  if (in.storage().direct()) {
    move.in_ = in;
    move.work_ = axes.group().all_reduce(in, move.out_, options);
  } else {
    copy(axes.context(), in, move.out_);
    move.work_ = axes.group().all_reduce(move.out_, move.out_, options);
  }
  return move;
}

// Averages, minima and maxima of equal values are that value.
Move Moves::contribute(const Tensor& in, const DeviceMesh& axis, ReduceOp op) {
  if (op != ReduceOp::sum || axis.rank() == 0) return Move(in);
  return Move(Tensor::zeros(axis.context(), in.shape(), in.dtype(), in.storage().memory(), in.stream()));
}

Tensor Move::finish() {
  if (work_.valid()) work_.wait();
  const Fold f = fold(out_.shape(), dim_, out_.dtype());
  switch (after_) {
    case After::nothing: break;
    case After::unpack_gathered:
    case After::unpack_exchanged: {
      // Gathered blocks are all as long as the longest part, exchanged ones as long as their own.
      const Mover mover(axis_.context(), out_);
      const std::byte* next = blocks_.data();
      for (int r = 0; r < axis_.size(); ++r) {
        const std::int64_t extent = cut_.size(after_ == After::unpack_gathered ? 0 : r);
        put_part(mover, f, cut_, r, next, extent, out_.data());
        next += static_cast<std::size_t>(f.outer * extent) * f.inner_bytes;
      }
      break;
    }
    case After::drop_padding: {
      const std::int64_t own = cut_.size(axis_.rank());
      Tensor out = shared_tensor(axis_.context(), resized(out_.shape(), dim_, own), out_);
      copy_slab(Mover(axis_.context(), out_), f, own, {out_.data(), out_.size(dim_), 0},
                {out.data(), own, 0});
      return out;
    }
  }
  return out_;
}

}  // namespace weft
