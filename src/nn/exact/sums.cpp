#include "nn/exact/sums.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "base/mutant.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/exact.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/module.hpp"

namespace weft::exact {
namespace {

using kernels::ProductTree;
using kernels::Stored;

// The names of the axes of several ranks that cut dimension `dim`, outermost first.
std::vector<std::string> axes_that_cut(const LayoutRef& layout, int dim) {
  std::vector<std::string> names;
  if (layout == nullptr) return names;
  for (const int axis : layout->nesting)
    if (layout->mesh_shape().size(axis) > 1 &&
        is_shard(layout->placements[static_cast<std::size_t>(axis)], dim))
      names.push_back(layout->mesh_shape().name(axis));
  return names;
}

int ranks_that_cut(const LayoutRef& layout, int dim) {
  int ranks = 1;
  if (layout == nullptr) return ranks;
  for (int axis = 0; axis < layout->mesh_shape().axis_count(); ++axis)
    if (is_shard(layout->placements[static_cast<std::size_t>(axis)], dim))
      ranks *= layout->mesh_shape().size(axis);
  return ranks;
}

std::int64_t product_of(const Shape& shape, int from, int to) {
  std::int64_t n = 1;
  for (int d = from; d < to; ++d) n *= shape[d];
  return n;
}

// c = a b, (m, n), over the tree.
void multiply(Frame& frame, const Tensor& a, Stored a_stored, const Tensor& b, Stored b_stored,
              const Tensor& c, std::int64_t m, std::int64_t n, std::int64_t k, const ProductTree& tree) {
  if (a.dtype() == DType::bf16)
    kernels::tree_matmul(frame.kernels(), a.data_ptr<bf16>(), a_stored, b.data_ptr<bf16>(), b_stored,
                         c.data_ptr<float>(), m, n, k, tree);
  else
    kernels::tree_matmul(frame.kernels(), a.data_ptr<float>(), a_stored, b.data_ptr<float>(), b_stored,
                         c.data_ptr<float>(), m, n, k, tree);
}

// to = the sum of parts [first, first + count) of a tree.
template <class Leaf>
void add_tree(Frame& frame, int first, int count, const Tensor& to, const Leaf& leaf) {
  if (count == 1) return leaf(first, to);
  add_tree(frame, first, count / 2, to, leaf);
  const Tensor second = frame.compute().make(to.shape(), to.dtype());
  add_tree(frame, first + count / 2, count / 2, second, leaf);
  kernels::add(frame.kernels(), to.data_ptr<float>(), second.data_ptr<float>(), to.data_ptr<float>(),
               to.count());
}

// Throws unless x is cut in no dimension but the first and the last, and if `positions`, the second.
void expect_samples_alone(const TensorName& what, const Tensor& x, bool positions) {
  if (x.layout() == nullptr) return;
  for (int dim = positions ? 2 : 1; dim + 1 < x.shape().rank(); ++dim)
    if (ranks_that_cut(x.layout(), dim) > 1)
      throw Error(ErrorCode::layout, fmt::format("{} is {}; in exact mode it must be whole in dimension {}",
                                                 what.text(), to_string(*x.layout()), dim));
}

}  // namespace

int blocks_here(const TensorName& what, const LayoutRef& layout, int dim) {
  const int ranks = ranks_that_cut(layout, dim);
  if (ranks == 1) return kExactBlocks;
  if (kExactBlocks % ranks != 0 || layout->global[dim] % ranks != 0)
    expect_exact_parts(fmt::format("{}: indices of dimension {}", what.text(), dim), layout->global[dim],
                       ranks);
  return kExactBlocks / ranks;
}

void output(Frame& frame, const Module& layer, const Tensor& x, const Tensor& w, const float* bias,
            const Tensor& y) {
  const std::int64_t in = w.size(1), out = w.size(0), tokens = out == 0 ? 0 : y.count() / out;
  multiply(frame, x, Stored::plain, w, Stored::transposed, y, tokens, out, in,
           {.leaves = WEFT_MUTANT("exact_output_whole")
                          ? 1
                          : blocks_here(layouts::named(layer, "weight"), w.layout(), 1)});
  if (bias != nullptr) kernels::add_bias(frame.kernels(), bias, y.data_ptr<float>(), tokens, out);
}

Tensor input_gradient(Frame& frame, const Module& layer, const Tensor& dy, const Tensor& w,
                      std::span<const std::int64_t> segments, const Tensor& dx) {
  const std::int64_t in = w.size(1), out = w.size(0), tokens = in == 0 ? 0 : dx.count() / in;
  const int leaves = blocks_here(layouts::named(layer, "weight"), w.layout(), 0);
  std::vector<std::int64_t> here(segments.begin(), segments.end());
  for (std::int64_t& size : here) size = size * leaves / kExactBlocks;
  multiply(frame, dy, Stored::plain, w, Stored::plain, dx, tokens, in, out,
           {.leaves = WEFT_MUTANT("exact_dx_whole") ? 1 : leaves, .segments = here});
  return WEFT_MUTANT("exact_dx_unsummed") ? dx : summed(dx);
}

namespace {

void map_weight_gradient(Frame& frame, const TensorName& what, const Tensor& dy, const Tensor& x,
                         const Tensor& dw, bool add);

}  // namespace

void weight_gradient(Frame& frame, const Module& layer, const Tensor& dy, const Tensor& x, const Tensor& dw,
                     bool add) {
  const TensorName what = layouts::named(layer, "x");
  if (x.shape().rank() > 3) return map_weight_gradient(frame, what, dy, x, dw, add);
  expect_samples_alone(what, x, false);
  const std::int64_t out = dw.size(0), in = dw.size(1),
                     tokens = product_of(x.shape(), 0, x.shape().rank() - 1);
  const std::int64_t unit = product_of(x.shape(), 1, x.shape().rank() - 1);
  const Tensor to = add ? frame.compute().make(dw.shape()) : dw;
  multiply(frame, dy, Stored::transposed, x, Stored::plain, to, out, in, tokens,
           {.leaves = WEFT_MUTANT("exact_dw_whole") ? 1 : blocks_here(what, x.layout(), 0),
            .unit = std::max<std::int64_t>(unit, 1)});
  if (add)
    kernels::add(frame.kernels(), dw.data_ptr<float>(), to.data_ptr<float>(), dw.data_ptr<float>(),
                 dw.count());
}

Tensor summed(const Tensor& t) {
  if (t.layout() == nullptr || !t.layout()->partial()) return t;
  Placements placements = t.layout()->placements;
  for (Placement& p : placements)
    if (is_partial(p)) p = Replicate{};
  return redistribute(t, placements);
}

void over_samples(Frame& frame, const Module& layer, const Tensor& x, int inner, const Tensor& to, bool add,
                  const std::function<void(Chunk tokens, const Tensor& sum)>& leaf) {
  const TensorName what = layouts::named(layer, "x");
  expect_samples_alone(what, x, false);
  const std::int64_t samples = x.size(0), unit = product_of(x.shape(), 1, x.shape().rank() - inner);
  const int blocks = WEFT_MUTANT("exact_table_whole") ? 1 : blocks_here(what, x.layout(), 0);
  const Tensor sum = add ? frame.compute().make(to.shape()) : to;
  add_tree(frame, 0, blocks, sum, [&](int index, const Tensor& part) {
    const Chunk of = exact_block(samples, blocks, index);
    leaf({of.offset * unit, of.size * unit}, part);
  });
  if (add)
    kernels::add(frame.kernels(), to.data_ptr<float>(), sum.data_ptr<float>(), to.data_ptr<float>(),
                 to.count());
}

namespace {

// Partial sums of a rank, (samples' blocks, positions' blocks, width), become those of all ranks that share
// dimension `dim` of x, the positions: (ranks, samples' blocks, positions' blocks, width).
Tensor of_all_positions(const Tensor& own, const LayoutRef& x, int dim) {
  const std::vector<std::string> axes = axes_that_cut(x, dim);
  Shape shape{1};
  for (const std::int64_t extent : own.shape()) shape.push_back(extent);
  if (axes.empty()) return own.reshape(shape);
  // Ranks with other samples hold other values. The layout states that the values are the same, since nothing
  // is exchanged with these ranks.
  const DeviceMesh mesh = x->mesh().submesh(axes);
  Shape global = shape;
  global[0] = mesh.size();
  const LayoutRef apart = replicated_layout(x->mesh(), global)->with(mesh, Shard{0});
  return redistribute(as_layout(own.reshape(shape), apart), mesh, Replicate{}).with_layout(nullptr);
}

// to += from, then the tree over `count` arrays of `width` numbers that lie `stride` apart.
template <class T>
void tree_in_place(T* first, int count, std::int64_t stride, std::int64_t width) {
  for (int step = 1; step < count; step *= 2)
    for (int i = 0; i + step < count; i += 2 * step)
      for (std::int64_t j = 0; j < width; ++j) first[i * stride + j] += first[(i + step) * stride + j];
}

// The tree over the positions of each of `samples` arrays (positions' blocks, width), and over the ranks that
// share dimension `dim` of x. `own`: (samples, positions' blocks, width). The sums are the first array of
// each sample in the result, whose samples lie positions' blocks * width apart.
template <class T>
Tensor over_all_positions(const Tensor& own, const LayoutRef& x, int dim) {
  const Tensor all = of_all_positions(own, x, dim);
  const auto ranks = static_cast<int>(all.size(0)), positions = static_cast<int>(all.size(2));
  const std::int64_t width = all.size(3), of_rank = own.count();
  for (std::int64_t i = 0; i < all.size(1); ++i) {
    T* const first = all.data_ptr<T>() + i * positions * width;
    for (int rank = 0; rank < ranks; ++rank) tree_in_place(first + rank * of_rank, positions, width, width);
    tree_in_place(first, ranks, of_rank, width);
  }
  return all;
}

// The layout of the gradient of a parameter whose partial sums were added over the positions.
LayoutRef layout_of_sum(const LayoutRef& weight, const LayoutRef& x) {
  if (weight == nullptr || x == nullptr) return weight;
  Placements placements = weight->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (x->mesh_shape().size(static_cast<int>(axis)) > 1 && is_shard(x->placements[axis], 0))
      placements[axis] = Partial{};
  return weight->with(std::move(placements));
}

// x's elements of these samples and positions, one behind the other. x: (samples, positions, …)
Tensor packed_part(Frame& frame, const Tensor& x, const Chunk& samples, const Chunk& positions) {
  const std::int64_t each = product_of(x.shape(), 2, x.shape().rank()), of_sample = x.size(1) * each;
  const std::int64_t from = samples.offset * of_sample + positions.offset * each,
                     count = positions.size * each;
  if (samples.size == 1) return x.slice_flat(from, {count});
  const Tensor all = frame.compute().make({samples.size * count}, x.dtype());
  const std::size_t bytes = size_bytes(x.dtype());
  for (std::int64_t s = 0; s < samples.size; ++s)
    std::copy_n(x.data() + static_cast<std::size_t>(from + s * of_sample) * bytes,
                static_cast<std::size_t>(count) * bytes,
                all.data() + static_cast<std::size_t>(s * count) * bytes);
  return all;
}

// dw of maps, or of windows of maps: for each block of samples a tree over blocks of the second dimension,
// also of the ranks that cut it; then a tree over the blocks of samples. x: (samples, positions, …, in)
void map_weight_gradient(Frame& frame, const TensorName& what, const Tensor& dy, const Tensor& x,
                         const Tensor& dw, bool add) {
  expect_samples_alone(what, x, true);
  const int of_samples = blocks_here(what, x.layout(), 0),
            of_positions = WEFT_MUTANT("exact_map_dw_whole") ? 1 : blocks_here(what, x.layout(), 1);
  const std::int64_t out = dw.size(0), in = dw.size(1), width = out * in;
  const Tensor own = frame.compute().make({of_samples, 1, width}, DType::f32, Memory::shared);
  for (int i = 0; i < of_samples; ++i) {
    const Chunk samples = exact_block(x.size(0), of_samples, i);
    add_tree(frame, 0, of_positions, own.slice_flat(i * width, {out, in}), [&](int j, const Tensor& sum) {
      const Chunk positions = exact_block(x.size(1), of_positions, j);
      const Tensor of_dy = packed_part(frame, dy, samples, positions),
                   of_x = packed_part(frame, x, samples, positions);
      multiply(frame, of_dy, Stored::transposed, of_x, Stored::plain, sum, out, in,
               in == 0 ? 0 : of_x.count() / in, {.leaves = 1});
    });
  }
  const Tensor all = over_all_positions<float>(own, x.layout(), 1);
  float* const sum = all.data_ptr<float>();
  tree_in_place(sum, of_samples, width, width);
  float* const to = dw.data_ptr<float>();
  for (std::int64_t k = 0; k < width; ++k) to[k] = add ? to[k] + sum[k] : sum[k];
}

}  // namespace

LayoutRef summed_over_positions(const LayoutRef& gradient, const LayoutRef& x) {
  if (gradient == nullptr || x == nullptr) return gradient;
  Placements placements = gradient->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (is_partial(placements[axis]) && is_shard(x->placements[axis], 1)) placements[axis] = Replicate{};
  return gradient->with(std::move(placements));
}

template <class T>
Tensor block_sums(Frame& frame, const LayoutRef& x, const SampleBlocks& blocks, std::int64_t width,
                  const std::function<void(std::int64_t sample, Chunk positions, T* sum)>& add) {
  const Tensor own =
      frame.compute().make({blocks.of_samples, blocks.of_positions, width},
                           std::is_same_v<T, double> ? DType::f64 : DType::f32, Memory::shared);
  T* sum = own.data_ptr<T>();
  std::fill_n(sum, own.count(), T(0));
  for (int i = 0; i < blocks.of_samples; ++i)
    for (int j = 0; j < blocks.of_positions; ++j, sum += width) {
      const Chunk samples = exact_block(blocks.samples, blocks.of_samples, i),
                  part = exact_block(blocks.positions, blocks.of_positions, j);
      for (std::int64_t s = samples.offset; s < samples.offset + samples.size && part.size > 0; ++s)
        add(s, part, sum);
    }
  const Tensor all = over_all_positions<T>(own, x, blocks.dim);
  if (blocks.of_positions == 1) return all.slice_flat(0, {blocks.of_samples, width});
  const Tensor sums = frame.compute().make({blocks.of_samples, width}, own.dtype());
  for (int i = 0; i < blocks.of_samples; ++i)
    std::copy_n(all.data_ptr<T>() + i * blocks.of_positions * width, width, sums.data_ptr<T>() + i * width);
  return sums;
}
template Tensor block_sums<float>(Frame&, const LayoutRef&, const SampleBlocks&, std::int64_t,
                                  const std::function<void(std::int64_t, Chunk, float*)>&);
template Tensor block_sums<double>(Frame&, const LayoutRef&, const SampleBlocks&, std::int64_t,
                                   const std::function<void(std::int64_t, Chunk, double*)>&);

template <class T>
void add_samples(const Tensor& sums) {
  tree_in_place(sums.data_ptr<T>(), static_cast<int>(sums.size(0)), sums.size(1), sums.size(1));
}
template void add_samples<float>(const Tensor&);
template void add_samples<double>(const Tensor&);

SampleBlocks blocks_of(const TensorName& what, const Tensor& x, int dim) {
  const bool has_positions = x.shape().rank() > dim;
  SampleBlocks blocks{.dim = dim};
  if (x.shape().rank() > 0) {
    blocks.samples = x.size(0);
    blocks.of_samples = blocks_here(what, x.layout(), 0);
  }
  if (has_positions) {
    blocks.positions = x.size(dim);
    blocks.of_positions =
        dim == 1 && WEFT_MUTANT("exact_bias_whole") ? 1 : blocks_here(what, x.layout(), dim);
  }
  return blocks;
}

namespace {

// Adds to the gradients of the parameters the sums of blocks, whose arrays lie one behind the other.
void over_blocks(Frame& frame, const LayoutRef& x, const SampleBlocks& blocks,
                 std::span<Parameter* const> parameters,
                 const std::function<void(std::int64_t, Chunk, std::span<float* const>)>& add) {
  std::int64_t width = 0;
  for (const Parameter* p : parameters) width += p->weight().count();
  const Tensor sums =
      block_sums<float>(frame, x, blocks, width, [&](std::int64_t sample, Chunk positions, float* sum) {
        std::vector<float*> each;
        for (const Parameter* p : parameters) {
          each.push_back(sum);
          sum += p->weight().count();
        }
        add(sample, positions, each);
      });
  add_samples<float>(sums);
  const float* from = sums.data_ptr<float>();
  for (Parameter* p : parameters) {
    const std::int64_t count = p->weight().count();
    p->accumulate(layout_of_sum(p->weight().layout(), x), [&](const Tensor& into, bool more) {
      float* const to = into.data_ptr<float>();
      for (std::int64_t k = 0; k < count; ++k) to[k] = more ? to[k] + from[k] : from[k];
    });
    from += count;
  }
}

}  // namespace

void over_positions(Frame& frame, const Module& layer, const Tensor& x,
                    std::span<Parameter* const> parameters,
                    const std::function<void(Chunk rows, std::span<float* const> sums)>& add) {
  const TensorName what = layouts::named(layer, "x");
  expect_samples_alone(what, x, true);
  SampleBlocks blocks{.dim = 1};  // of one sample, if x is a vector
  if (x.shape().rank() > 1) {
    blocks.samples = x.size(0);
    blocks.of_samples = blocks_here(what, x.layout(), 0);
  }
  std::int64_t inner = 1;
  if (x.shape().rank() > 2) {
    inner = product_of(x.shape(), 2, x.shape().rank() - 1);
    blocks.positions = x.size(1);
    blocks.of_positions = WEFT_MUTANT("exact_positions_whole") ? 1 : blocks_here(what, x.layout(), 1);
  }
  over_blocks(frame, x.layout(), blocks, parameters,
              [&](std::int64_t sample, Chunk positions, std::span<float* const> sums) {
                add({(sample * blocks.positions + positions.offset) * inner, positions.size * inner}, sums);
              });
}

void over_rows(
    Frame& frame, const Module& layer, const Tensor& x, std::span<Parameter* const> parameters,
    const std::function<void(std::int64_t sample, Chunk rows, std::span<float* const> sums)>& add) {
  SampleBlocks blocks = blocks_of(layouts::named(layer, "x"), x, 2);
  if (WEFT_MUTANT("exact_map_norm_whole")) blocks.of_positions = 1;
  over_blocks(frame, x.layout(), blocks, parameters, add);
}

}  // namespace weft::exact
