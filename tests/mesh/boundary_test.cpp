// Boundaries: backward is the adjoint of forward, in exact integer arithmetic; and a pair of parallel layers
// made of them equals the serial pair.
#include "weft/mesh/boundary.hpp"

#include <gtest/gtest.h>

#include "mesh/whole.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"

namespace weft::boundary_test {
namespace {

using test::expect_error;
using test::local_part;
using test::Rank;
using test::run_ranks;
using test::whole_tensor;

/// Small positive and negative integers that depend on rank and index; replicas are equal. The function makes
/// one global tensor for each rank of a Partial axis, and then cuts it by the layout.
Tensor any_tensor(LayoutRef layout, int seed) {
  const MeshShape& mesh = layout->mesh_shape();
  const int rank = layout->mesh().rank();
  int which = seed;  // differs between the ranks of a Partial axis only
  for (int a = 0; a < mesh.axis_count(); ++a)
    if (is_partial(layout->placements[static_cast<std::size_t>(a)]))
      which = which * 5 + mesh.coordinate(rank, a);
  Placements cut = layout->placements;
  for (Placement& p : cut)
    if (is_partial(p)) p = Replicate{};
  std::vector<double> whole = whole_tensor(layout->global);
  for (std::size_t i = 0; i < whole.size(); ++i)
    whole[i] = static_cast<double>((static_cast<int>(whole[i]) * (which + 3) + static_cast<int>(i)) % 13 - 6);
  return local_part<std::int64_t>(whole, layout->with(cut)).with_layout(layout);
}

/// <value, gradient> over a whole mesh of one axis, from the definition. A replicated value with a replicated
/// gradient is one vector, counted once. In every other form each rank's part or contribution counts.
std::int64_t pairing(const Tensor& value, const Tensor& gradient, ProcessGroup& group) {
  EXPECT_EQ(value.shape(), gradient.shape());
  const bool once = value.layout()->replicated() && gradient.layout()->replicated();
  std::vector<std::int64_t> dot{0};
  if (!once || group.rank() == 0)
    for (std::size_t i = 0; i < value.as<std::int64_t>().size(); ++i)
      dot[0] += value.as<std::int64_t>()[i] * gradient.as<std::int64_t>()[i];
  group.all_reduce(view(dot), view(dot)).wait();
  return dot[0];
}

/// The placements that a gradient of a value with this placement may have.
std::vector<Placement> gradient_forms(const Placement& value) {
  if (is_shard(value)) return {value};
  if (is_partial(value)) return {Replicate{}};
  return {Replicate{}, Partial{}};
}

TEST(Boundary, BackwardIsTheAdjoint) {
  for (const int n : {1, 2, 3, 4})
    run_ranks(test::Ranks::threads, n, [](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"tp", -1}});
      const std::vector<Placement> all{Replicate{}, Shard{0}, Shard{1}, Partial{}};
      for (const Shape& global : {Shape{4, 12}, Shape{5, 3}, Shape{1, 7}})
        for (const Placement& from : all)
          for (const Placement& to : all)
            for (const Placement& form : gradient_forms(to)) {
              SCOPED_TRACE(to_string(from) + " to " + to_string(to) + ", gradient " + to_string(form));
              const RedistributeBoundary boundary(mesh["tp"], from, to);
              const Tensor x = any_tensor(make_layout(mesh, {from}, global), 1);
              const Tensor dy = any_tensor(make_layout(mesh, {form}, global), 2);
              const Tensor y = boundary.forward(x, "x");
              const Tensor dx = boundary.backward(dy, "dy");
              ASSERT_EQ(y.layout(), make_layout(mesh, {to}, global));
              ASSERT_EQ(dx.layout(),
                        make_layout(mesh, {is_shard(from) ? from : Placement(Replicate{})}, global));
              const std::int64_t left = pairing(y, dy, r.group()), right = pairing(x, dx, r.group());
              ASSERT_EQ(left, right);
              if (global.count() > 7) {
                ASSERT_NE(left, 0) << "a pairing of nothing proves nothing";
              }
            }
    });
}

TEST(Boundary, NamedOnesDoWhatTheirNamesSay) {
  run_ranks(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 3}});
    const DeviceMesh tp = mesh["tp"];
    const std::vector<double> whole = whole_tensor({4, 5});
    const auto part = [&](const Placement& p) {
      return local_part<float>(whole, make_layout(mesh, {p}, {4, 5}));
    };
    const auto same = [](const Tensor& a, const Tensor& b) {
      return a.layout() == b.layout() && test::equal_elements<float>(a.as<float>(), b.as<float>());
    };
    const BoundaryRef enter = boundary::enter(tp), leave = boundary::leave(tp),
                      gather = boundary::gather(tp, 1);
    const Tensor x = part(Replicate{});
    EXPECT_EQ(enter->forward(x, "x").data(), x.data()) << "identity, no copy";
    EXPECT_TRUE(same(enter->backward(part(Partial{}), "dy"), x));
    EXPECT_EQ(enter->backward(x, "dy").data(), x.data()) << "reduced already";
    EXPECT_TRUE(same(leave->forward(part(Partial{}), "x"), x));
    EXPECT_EQ(leave->backward(x, "dy").data(), x.data());
    EXPECT_TRUE(same(gather->forward(part(Shard{1}), "x"), x));
    EXPECT_TRUE(same(gather->backward(part(Partial{}), "dy"), part(Shard{1})));
    EXPECT_TRUE(same(gather->backward(x, "dy"), part(Shard{1})));
    EXPECT_TRUE(same(boundary::scatter(tp, 0, Partial{})->forward(part(Partial{}), "x"), part(Shard{0})));
    EXPECT_TRUE(same(boundary::scatter(tp, 0, Replicate{})->forward(x, "x"), part(Shard{0})));
    EXPECT_TRUE(same(boundary::scatter(tp, 0, Replicate{})->backward(part(Shard{0}), "dy"), x));
  });
}

/// (rows of a, columns of b): a: (m, k), b: (n, k), the result a bᵀ: (m, n).
Tensor multiply(Context& context, const Tensor& a, const Tensor& b) {
  Tensor out = Tensor::zeros(context, {a.size(0), b.size(0)}, DType::i64);
  for (std::int64_t i = 0; i < a.size(0); ++i)
    for (std::int64_t j = 0; j < b.size(0); ++j)
      for (std::int64_t k = 0; k < a.size(1); ++k)
        out.as<std::int64_t>()[static_cast<std::size_t>(i * b.size(0) + j)] +=
            a.as<std::int64_t>()[static_cast<std::size_t>(i * a.size(1) + k)] *
            b.as<std::int64_t>()[static_cast<std::size_t>(j * b.size(1) + k)];
  return out;
}

Tensor transpose(Context& context, const Tensor& a) {
  Tensor out(context, {a.size(1), a.size(0)}, DType::i64);
  for (std::int64_t i = 0; i < a.size(0); ++i)
    for (std::int64_t j = 0; j < a.size(1); ++j)
      out.as<std::int64_t>()[static_cast<std::size_t>(j * a.size(0) + i)] =
          a.as<std::int64_t>()[static_cast<std::size_t>(i * a.size(1) + j)];
  return out;
}

// y = x w1ᵀ w2ᵀ with w1 cut by rows (column parallel) and w2 by columns (row parallel), tokens split over dp.
// forward, dx, dw1 and dw2 equal those of whole matrices.
TEST(Boundary, ColumnThenRowEqualsSerial) {
  const std::int64_t tokens = 6, in = 5, hidden = 7, out = 4;
  run_ranks(test::Ranks::threads, 4, [&](Rank& r) {
    Context& c = r.context;
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
    const auto whole = [&](const Shape& s, int seed) {
      return any_tensor(replicated_layout(mesh, s), seed).with_layout(nullptr);
    };
    const Tensor x = whole({tokens, in}, 1), w1 = whole({hidden, in}, 2), w2 = whole({out, hidden}, 3),
                 dy = whole({tokens, out}, 4);
    const Tensor h = multiply(c, x, w1);
    const Tensor dh = multiply(c, dy, transpose(c, w2));

    const Tensor xs = distribute(x, make_layout(mesh, {{"dp", Shard{0}}}, x.shape()));
    const Tensor dys = distribute(dy, make_layout(mesh, {{"dp", Shard{0}}}, dy.shape()));
    const Tensor w1s = distribute(w1, make_layout(mesh, {{"tp", Shard{0}}}, w1.shape()));
    const Tensor w2s = distribute(w2, make_layout(mesh, {{"tp", Shard{1}}}, w2.shape()));
    const BoundaryRef enter = boundary::enter(mesh["tp"]), leave = boundary::leave(mesh["tp"]);
    const auto stated = [&](const Tensor& t, Placement dp, Placement tp, const Shape& global) {
      return as_layout(t, make_layout(mesh, {dp, tp}, global));
    };

    const Tensor hs = stated(multiply(c, enter->forward(xs, "x"), w1s), Shard{0}, Shard{1}, {tokens, hidden});
    const Tensor ys = leave->forward(stated(multiply(c, hs, w2s), Shard{0}, Partial{}, {tokens, out}), "y");
    const Tensor dhs = stated(multiply(c, leave->backward(dys, "dy"), transpose(c, w2s)), Shard{0}, Shard{1},
                              {tokens, hidden});
    const Tensor dxs =
        enter->backward(stated(multiply(c, dhs, transpose(c, w1s)), Shard{0}, Partial{}, {tokens, in}), "dx");
    const Tensor dw1 =
        stated(multiply(c, transpose(c, dhs), transpose(c, xs)), Partial{}, Shard{0}, {hidden, in});
    const Tensor dw2 =
        stated(multiply(c, transpose(c, dys), transpose(c, hs)), Partial{}, Shard{1}, {out, hidden});

    const auto same = [](const Tensor& parallel, const Tensor& serial) {
      return test::equal_elements<std::int64_t>(full(parallel).as<std::int64_t>(), serial.as<std::int64_t>());
    };
    EXPECT_TRUE(same(ys, multiply(c, h, w2)));
    EXPECT_TRUE(same(dxs, multiply(c, dh, transpose(c, w1))));
    EXPECT_TRUE(same(dw1, multiply(c, transpose(c, dh), transpose(c, x))));
    EXPECT_TRUE(same(dw2, multiply(c, transpose(c, dy), transpose(c, h))));
  });
}

TEST(Boundary, AListOfAxesIsOneAxis) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh whole_mesh(r.group(), {{"tp", 4}});
    const DeviceMesh mesh = whole_mesh.unflatten("tp", {{"kv", 2}, {"rep", 2}});
    const DeviceMesh tp = mesh["tp"];
    const Shape global{6, 5};
    const LayoutRef all = replicated_layout(mesh, global);
    for (const Placement& from : {Placement(Replicate{}), Placement(Shard{0}), Placement(Partial{})})
      for (const Placement& to : {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})})
        for (const Placement& form : gradient_forms(to)) {
          SCOPED_TRACE(to_string(from) + " to " + to_string(to) + ", gradient " + to_string(form));
          const RedistributeBoundary boundary(tp, from, to);
          const Tensor x = any_tensor(all->with(tp, from), 1), dy = any_tensor(all->with(tp, form), 2);
          const Tensor y = boundary.forward(x, "x"), dx = boundary.backward(dy, "dy");
          ASSERT_EQ(y.layout(), all->with(tp, to));
          ASSERT_EQ(y.layout(), boundary.out_layout(x.layout(), "x"));
          ASSERT_EQ(pairing(y, dy, r.group()), pairing(x, dx, r.group()));
        }
  });
}

TEST(Boundary, VanishesOnAnAxisOfOneRank) {
  run_ranks(test::Ranks::threads, 1, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 1}});
    const Tensor plain = Tensor::zeros(r.context, {2, 3});
    const DeviceMesh tp = mesh["tp"];
    for (const RedistributeBoundary& b : {RedistributeBoundary(tp, Replicate{}, Replicate{}),
                                          RedistributeBoundary(tp, Partial{}, Replicate{}),
                                          RedistributeBoundary(tp, Shard{1}, Replicate{})}) {
      EXPECT_EQ(b.forward(plain, "x").data(), plain.data());
      EXPECT_EQ(b.backward(plain, "dy").data(), plain.data());
      const Tensor stated = as_layout(plain, make_layout(mesh, {b.from()}, {2, 3}));
      EXPECT_EQ(b.forward(stated, "x").data(), plain.data());
      EXPECT_EQ(b.forward(stated, "x").layout(), make_layout(mesh, {b.to()}, {2, 3}));
    }
  });
}

TEST(Boundary, ErrorsNameTensorAndAxis) {
  Context context;
  const auto code = ErrorCode::layout;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 0);
  const DeviceMesh tp = mesh["tp"];
  const Tensor plain = Tensor::zeros(context, {4, 4});
  const auto placed = [&](Placement p) {
    return plain.with_layout(make_layout(mesh, {Replicate{}, p}, {4, 4}));
  };

  expect_error(code, "layers.0.mlp: x is Replicate on tp=2; expected Partial(sum)",
               [&] { (void)boundary::leave(tp)->forward(placed(Replicate{}), "layers.0.mlp: x"); });
  expect_error(
      code,
      "layers.0.mlp: x is a plain tensor; on tp=2 it needs a layout, which says what part of the whole it is",
      [&] { (void)boundary::enter(tp)->forward(plain, "layers.0.mlp: x"); });
  expect_error(code,
               "layers.0.mlp: dy is a plain tensor; on tp=2 it needs a layout, which says what part of the "
               "whole it is",
               [&] { (void)boundary::enter(tp)->backward(plain, "layers.0.mlp: dy"); });
  expect_error(
      code, "head: dy is Shard(1) on tp=2; expected Replicate or Partial(sum), the gradient of a Replicate",
      [&] { (void)boundary::enter(tp)->backward(placed(Shard{1}), "head: dy"); });
  expect_error(
      code,
      "head: dy is Partial(avg) on tp=2; expected Replicate or Partial(sum), the gradient of a Replicate",
      [&] { (void)boundary::leave(tp)->backward(placed(Partial{ReduceOp::avg}), "head: dy"); });
  expect_error(code, "head: dy is Partial(sum) on tp=2; expected Shard(1), the gradient of a Shard(1)",
               [&] { (void)boundary::scatter(tp, 1, Partial{})->backward(placed(Partial{}), "head: dy"); });
  expect_error(
      code, "head: dy is Partial(sum) on tp=2; expected Replicate, the gradient of a Partial(sum)", [&] {
        (void)RedistributeBoundary(tp, Replicate{}, Partial{}).backward(placed(Partial{}), "head: dy");
      });
  expect_error(code, "boundary: Partial(max) on tp; only a sum has this adjoint",
               [&] { RedistributeBoundary(tp, Partial{ReduceOp::max}, Replicate{}); });
}

}  // namespace
}  // namespace weft::boundary_test
