#include "mesh/moves.hpp"

#include <algorithm>

#include "mesh/boxes.hpp"
#include "weft/host/copy.hpp"

namespace weft {

namespace {

/// A tensor on the device of `like`, in memory on which collectives work in place.
Tensor shared_tensor(Context& context, const Shape& shape, const Tensor& like) {
  return {context, shape, like.dtype(), Memory::shared, like.stream()};
}

/// Elements of `of`, from `at` on.
TensorView flat(const Tensor& of, std::int64_t at, std::int64_t count) {
  return {of.data() + at * size_bytes(of.dtype()), of.dtype(), of.device(), Dims::line(count), Dims::line(1)};
}

/// A call on a device waits for the work that was queued on the tensors' stream before it.
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

/// Moves the elements of tensors that lie on one device, in order on their stream.
struct Mover {
  DeviceRuntime& runtime;
  Stream stream;
  Mover(Context& context, const Tensor& t) : runtime(context.device(t.device())), stream(t.stream()) {}

  void copy(const ConstTensorView& from, const TensorView& to) const {
    copy_elements(runtime, stream, from, to);
  }
  void clear(const TensorView& to) const { clear_elements(runtime, stream, to); }
  /// Copies the part that `rank` holds of a tensor that is whole in `dim` to a separate tensor, which may be
  /// longer.
  void take_part(const Cut& cut, int rank, int dim, const TensorView& whole, const TensorView& part) const {
    cut.for_each_run(rank, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t length) {
      copy(narrow(whole, dim, in_whole, length), narrow(part, dim, in_part, length));
    });
  }
  /// The way back.
  void put_part(const Cut& cut, int rank, int dim, const TensorView& part, const TensorView& whole) const {
    cut.for_each_run(rank, [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t length) {
      copy(narrow(part, dim, in_part, length), narrow(whole, dim, in_whole, length));
    });
  }
};

/// Elements of `of`, from `at` on, as a tensor of that shape, except that `dim` is `size` long.
TensorView block_of(const Tensor& of, std::int64_t at, const Shape& shape, int dim, std::int64_t size) {
  const Shape s = resized(shape, dim, size);
  return {flat(of, at, 0).data, of.dtype(), of.device(), s, row_major(s)};
}

bool is_outermost(const Shape& shape, int dim) {
  return std::all_of(shape.begin(), shape.begin() + dim, [](std::int64_t n) { return n == 1; });
}

}  // namespace

Move Moves::slice(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut) {
  Tensor out(axis.context(), resized(in.shape(), dim, cut.size(axis.rank())), in.dtype(),
             in.storage().memory(), in.stream());
  Mover(axis.context(), in).take_part(cut, axis.rank(), dim, in, out);
  return Move(std::move(out));
}

// Every rank contributes a block as long as the longest part. It holds the rank's part, then padding that
// nobody reads. The blocks of all ranks arrive one after the other. If dim is outermost and the parts are
// equal, the blocks already form the whole tensor. Otherwise finish() copies each part to its place.
Move Moves::gather(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut, int tag) {
  Move move;
  move.out_ = shared_tensor(axis.context(), resized(in.shape(), dim, cut.whole()), in);
  if (move.out_.count() == 0) return move;
  const std::int64_t longest = cut.size(0);
  const std::int64_t count = move.out_.count() / cut.whole() * longest;  // elements of a block
  const bool in_place = is_outermost(in.shape(), dim) && cut.even();
  move.blocks_ = in_place ? move.out_ : shared_tensor(axis.context(), Dims::line(axis.size() * count), in);
  const std::int64_t at = axis.rank() * count, own = in.size(dim);
  const TensorView mine = block_of(move.blocks_, at, in.shape(), dim, longest);
  const Mover mover(axis.context(), in);
  mover.copy(in, narrow(mine, dim, 0, own));
  mover.clear(narrow(mine, dim, own, longest - own));
  if (!in_place) {
    move.axis_ = axis;
    move.cut_ = cut;
    move.dim_ = dim;
    move.after_ = Move::After::unpack_gathered;
  }
  move.work_ = axis.group().all_gather(flat(move.blocks_, at, count),
                                       flat(move.blocks_, 0, axis.size() * count), options_of(in, tag));
  return move;
}

// The reverse of gather. The parts are laid out one after the other, each padded to a block as long as the
// longest. Each rank receives its reduced block and drops the padding.
Move Moves::reduce_scatter(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut, ReduceOp op,
                           int tag) {
  Move move;
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
  const bool in_place = is_outermost(in.shape(), dim) && cut.even() && in.storage().direct();
  move.blocks_ = in_place ? in : shared_tensor(axis.context(), Dims::line(axis.size() * count), in);
  const Mover mover(axis.context(), in);
  for (int r = 0; r < axis.size() && !in_place; ++r) {
    const TensorView block = block_of(move.blocks_, r * count, in.shape(), dim, longest);
    mover.take_part(cut, r, dim, in, block);
    mover.clear(narrow(block, dim, cut.size(r), longest - cut.size(r)));
  }
  move.work_ = axis.group().reduce_scatter(flat(move.blocks_, 0, axis.size() * count), move.out_,
                                           options_of(in, tag, op));
  return move;
}

// This rank divides its tensor along `to` and sends part p to rank p. Rank p sends back part p along `from`
// of this rank's result. Both ranks know the sizes.
Move Moves::exchange(const Tensor& in, const DeviceMesh& axis, int from, const Cut& from_cut, int to,
                     const Cut& to_cut, int tag) {
  const int n = axis.size();
  Move move;
  move.out_ = shared_tensor(
      axis.context(), resized(resized(in.shape(), to, to_cut.size(axis.rank())), from, from_cut.whole()), in);
  move.in_ = shared_tensor(axis.context(), Dims::line(in.count()), in);
  move.blocks_ = shared_tensor(axis.context(), Dims::line(move.out_.count()), in);
  std::vector<std::int64_t> sent(static_cast<std::size_t>(n)), received(sent);
  const Mover mover(axis.context(), in);
  std::int64_t at = 0;
  for (int r = 0; r < n; ++r) {
    const TensorView block = block_of(move.in_, at, in.shape(), to, to_cut.size(r));
    mover.take_part(to_cut, r, to, in, block);
    at += block.count();
    sent[static_cast<std::size_t>(r)] = block.count();
    received[static_cast<std::size_t>(r)] = resized(move.out_.shape(), from, from_cut.size(r)).count();
  }
  move.axis_ = axis;
  move.cut_ = from_cut;
  move.dim_ = from;
  move.after_ = Move::After::unpack_exchanged;
  move.work_ = axis.group().all_to_all_v(move.in_, move.blocks_, {sent}, {received}, options_of(in, tag));
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

// The average, minimum or maximum of equal values is that value.
Move Moves::contribute(const Tensor& in, const DeviceMesh& axis, ReduceOp op) {
  if (op != ReduceOp::sum || axis.rank() == 0) return Move(in);
  return Move(Tensor::zeros(axis.context(), in.shape(), in.dtype(), in.storage().memory(), in.stream()));
}

Tensor Move::finish() {
  if (work_.valid()) work_.wait();
  switch (after_) {
    case After::nothing: break;
    case After::unpack_gathered:
    case After::unpack_exchanged: {
      // Gathered blocks are all as long as the longest part. Exchanged blocks are as long as their own part.
      const Mover mover(axis_.context(), out_);
      std::int64_t at = 0;
      for (int r = 0; r < axis_.size(); ++r) {
        const std::int64_t extent = cut_.size(after_ == After::unpack_gathered ? 0 : r);
        const TensorView block = block_of(blocks_, at, out_.shape(), dim_, extent);
        mover.put_part(cut_, r, dim_, block, out_);
        at += block.count();
      }
      break;
    }
    case After::drop_padding: {
      const std::int64_t own = cut_.size(axis_.rank());
      Tensor out = shared_tensor(axis_.context(), resized(out_.shape(), dim_, own), out_);
      Mover(axis_.context(), out_).copy(narrow(out_.view(), dim_, 0, own), out);
      return out;
    }
  }
  return out_;
}

}  // namespace weft
