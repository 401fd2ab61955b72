// Gradients on devices. Each rank has a late device, whose memory the host cannot touch and whose streams run
// as late as they can. The ranks reduce, compare, sum up and clip to the bits of the same ranks on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/late_backend.hpp"
#include "support/late_gradients.hpp"
#include "support/run_ranks.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/host/copy.hpp"

namespace weft::test::device_test {
namespace {

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr double kInf = std::numeric_limits<double>::infinity();

// The two variants of a test: on the CPU, or on a late device.
struct Side {
  Rank& rank;
  Compute& compute;
  ProcessGroup& group;

  Context& context() const { return compute.context(); }
  // Element i is value(i); what was written there is ordered on the stream.
  void write(const TensorView& to, const std::function<double(int)>& value) const {
    const Tensor here(context(), to.shape, to.dtype);
    for (std::int64_t i = 0; i < here.count(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      const auto x = static_cast<float>(value(static_cast<int>(i)));
      if (to.dtype == DType::f64) here.as<double>()[at] = value(static_cast<int>(i));
      if (to.dtype == DType::f32) here.as<float>()[at] = x;
      if (to.dtype == DType::bf16) here.as<bf16>()[at] = bf16(x);
      if (to.dtype == DType::f16) here.as<f16>()[at] = f16(x);
    }
    copy(context(), here, to, compute.stream());
  }
  Tensor make(const Shape& shape, DType dtype, const std::function<double(int)>& value) const {
    const Tensor t = compute.make(shape, dtype);
    write(t, value);
    return t;
  }
};

using Bits = std::vector<std::vector<std::byte>>;

// The values that the stream has written in `v`.
void keep(Bits& all, const Side& side, const TensorView& v) {
  const Tensor here(side.context(), v.shape, v.dtype);
  copy(side.context(), v, here, side.compute.stream());
  side.compute.wait();
  all.emplace_back(here.data(), here.data() + here.bytes());
}
void keep(Bits& all, double x) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&x);
  all.emplace_back(bytes, bytes + sizeof x);
}

// Runs `body` in both variants, and compares the results.
void expect_the_same(int ranks, const std::function<Bits(const Side&)>& body) {
  run_ranks(Ranks::threads, ranks, [&](Rank& r) {
    auto made = std::make_unique<LateDevice>(r.rank);
    const LateDevice& late = *made;
    r.context.add_device(std::move(made));
    add_late_gradients(r.context, late);
    Bits want, got;
    {
      Compute here(r.context, 2);
      want = body({r, here, r.group()});
    }
    {
      Compute there(r.context, 2, late.device());
      ProcessGroup group = ProcessGroup::create(r.context, late_collectives(), r.membership("on devices"));
      got = body({r, there, group});
    }
    EXPECT_EQ(late.blocks(), 0u) << "all memory was given back";
    ASSERT_EQ(got.size(), want.size());
    ASSERT_FALSE(want.empty());
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(got[i] == want[i]) << "number " << i;
  });
}

double number(const Side& side, std::size_t gradient, int step, int i) {
  return static_cast<double>((side.rank.rank + 1) * (7 * i % 11 + 1)) + static_cast<double>(gradient) + step;
}

// Three steps of a reducer of many dtypes: slots, bound memory that is copied and that is reduced in place,
// and passes that accumulate.
Bits reduce(const Side& side, const DeviceMesh& axes, Unused unused, bool as_bf16 = false) {
  std::vector<BucketEntry> entries;
  for (const DType t : kDTypes)
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg})
      for (const std::int64_t count : {5, 300, 0})
        entries.push_back({"g" + std::to_string(entries.size()), count, t, op});
  BucketReducer reducer(axes, entries,
                        {.bucket_bytes = 256,
                         .unused = unused,
                         .compute = &side.compute,
                         .hook = as_bf16 ? bf16_hook(side.context(), &side.compute) : BucketHook()});
  std::vector<Tensor> bound(entries.size());
  for (std::size_t i = 0; i < entries.size(); i += 2) {
    bound[i] = side.compute.make({entries[i].count}, entries[i].dtype);
    reducer.bind(i, bound[i]);
  }
  const auto where = [&](std::size_t i) { return bound[i] ? bound[i].view() : reducer.slot(i); };
  Bits all;
  for (int step = 0; step < 3; ++step) {
    std::optional<NoSync> off;
    if (step == 1) off.emplace(reducer.no_sync());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (unused == Unused::zeros && i % 5 == 1 && side.rank.rank == step % 2) continue;  // missing
      side.write(where(i), [&](int k) { return number(side, i, step, k) / (as_bf16 ? 3 : 1); });
      reducer.ready(i);
    }
    off.reset();
    reducer.finish();
    for (std::size_t i = 0; i < entries.size(); ++i) keep(all, side, where(i));
  }
  return all;
}

TEST(GradientsOnDevices, AreReducedInBuckets) {
  for (const Unused unused : {Unused::error, Unused::zeros})
    expect_the_same(2, [&](const Side& side) {
      const DeviceMesh mesh(side.group, {{"dp", 2}});
      return reduce(side, mesh, unused);
    });
}

TEST(GradientsOnDevices, AreReducedAsBf16) {
  for (const Unused unused : {Unused::error, Unused::zeros})
    expect_the_same(2, [&](const Side& side) {
      const DeviceMesh mesh(side.group, {{"dp", 2}});
      return reduce(side, mesh, unused, true);
    });
}

TEST(GradientsOnDevices, AreReducedOverSeveralAxes) {
  expect_the_same(4, [](const Side& side) {
    const DeviceMesh mesh(side.group, {{"dp", 2}, {"tp", 1}, {"domain", 2}});
    Bits all = reduce(side, mesh[{"dp", "domain"}], Unused::zeros);
    for (auto& more : reduce(side, mesh["domain"], Unused::error)) all.push_back(std::move(more));
    return all;
  });
}

// Reductions end before the memory is freed and the group ends, even if nobody has waited for the stream.
TEST(GradientsOnDevices, AReducerMayGoBeforeItsStreamHasRun) {
  expect_the_same(2, [](const Side& side) {
    const DeviceMesh mesh(side.group, {{"dp", 2}});
    Tensor kept;
    {
      BucketReducer reducer(mesh, {{"w", 6}}, {.unused = Unused::zeros, .compute = &side.compute});
      kept = reducer.tensor(0);
      side.write(kept, [&](int i) { return number(side, 0, 0, i); });
      reducer.ready(0);
      reducer.finish();
    }
    Bits all;
    keep(all, side, kept);
    return all;
  });
}

// Gradients of all dtypes, in memory of their own.
struct List {
  explicit List(const Side& of) : side(of) {}
  void put(LayoutRef layout, DType dtype, const std::function<double(int)>& value) {
    names.push_back("g" + std::to_string(names.size()));
    memory.push_back(side.make(layout->local_shape(), dtype, value));
    list.push_back({names.back(), memory.back().view(), layout});
  }
  void keep_all(Bits& all) const {
    for (const Tensor& t : memory) keep(all, side, t);
  }
  const Side& side;
  std::deque<std::string> names;
  std::vector<Tensor> memory;
  std::vector<Gradient> list;
};

TEST(GradientsOnDevices, AreAveraged) {
  expect_the_same(4, [](const Side& side) {
    const DeviceMesh mesh(side.group, {{"dp", 2}, {"tp", 2}});
    List g(side);
    for (const DType t : kDTypes)
      for (const Placement dp :
           {Placement(Partial{}), Placement(Partial{ReduceOp::avg}), Placement(Shard{0})})
        g.put(make_layout(mesh, {dp, Shard{0}}, {9, 3}), t,
              [&](int i) { return number(side, g.list.size(), 0, i); });
    // Its sum is infinite, and its average is not.
    g.put(make_layout(mesh, {Partial{ReduceOp::avg}, Shard{0}}, {9}), DType::f32,
          [](int i) { return i == 1 ? 3e38 : 1.0; });
    average_gradients(g.list, mesh["dp"], &side.compute);
    Bits all;
    g.keep_all(all);
    return all;
  });
}

TEST(GradientsOnDevices, ReplicasAreSynchronised) {
  expect_the_same(4, [](const Side& side) {
    const DeviceMesh mesh(side.group, {{"dp", 2}, {"tp", 2}});
    List g(side);
    for (const DType t : kDTypes)
      for (const Placement tp :
           {Placement(Partial{}), Placement(Partial{ReduceOp::avg}), Placement(Shard{0})})
        g.put(make_layout(mesh, {Replicate{}, tp}, {8}), t,
              [&](int i) { return 5 + 2 * i + side.rank.rank % 2; });
    // Replicas that differ by rounding, that are equal, and that differ by more.
    g.put(replicated_layout(mesh, {70001}), DType::f32,
          [&](int i) { return 1 + (i == 70000 ? side.rank.rank * 0x1p-23 : static_cast<double>(i % 3)); });
    g.put(replicated_layout(mesh, {7}), DType::bf16, [](int i) { return 3.0 * i; });
    sync_replicated_gradients(g.list, mesh[{"dp", "tp"}], {.compute = &side.compute});
    Bits all;
    g.keep_all(all);
    return all;
  });
}

TEST(GradientsOnDevices, DriftIsNamed) {
  expect_the_same(3, [](const Side& side) {
    const DeviceMesh mesh(side.group, {{"tp", 3}});
    const auto drift = [&](const std::function<double(int)>& value, SyncOptions options) {
      List g(side);
      g.put(replicated_layout(mesh, {5}), DType::f32, value);
      options.compute = &side.compute;
      return error_text(ErrorCode::mismatch, [&] { sync_replicated_gradients(g.list, mesh, options); });
    };
    const bool odd = side.rank.rank == 1;
    EXPECT_EQ(drift([&](int i) { return odd && i == 3 ? 1.5 : 1.0; }, {}),
              "sync_replicated_gradients: the gradient of \"g0\" is Replicate on tp=3, but on tp rank 1 it "
              "is 0.333 "
              "from the average, 1.82e+03 times what rounding explains; a replica drifted, or the gradient "
              "is Partial "
              "there");
    EXPECT_EQ(drift([&](int i) { return odd && i == 3 ? 1.5 : 1.0; }, {.tolerance = 0}),
              "sync_replicated_gradients: the gradient of \"g0\" is Replicate on tp=3, but on tp rank 1 it "
              "has other "
              "bits, where the tolerance is 0; a replica drifted, or the gradient is Partial there");
    EXPECT_EQ(
        drift([&](int) { return odd ? std::nan("") : 1.0; }, {}),
        "sync_replicated_gradients: the gradient of \"g0\" is Replicate on tp=3, but on tp rank 1 it is not "
        "finite; a replica drifted, or the gradient is Partial there");
    return Bits(1);
  });
}

TEST(GradientsOnDevices, AreSummedUpAndClipped) {
  expect_the_same(4, [](const Side& side) {
    const DeviceMesh mesh(side.group, {{"dp", 2}, {"tp", 2}}), experts(side.group, {{"ep", 4}});
    const auto fill = [&](List& g) {
      for (const DType t : kDTypes) {
        g.put(make_layout(mesh, {Replicate{}, Shard{0}}, {9, 3}), t,
              [&](int i) { return number(side, g.list.size(), 0, i % 5) / 8; });
        g.put(make_layout(experts, {Shard{0}}, {11}), t, [](int i) { return -2.5 + i; });
        g.put(replicated_layout(mesh, {70001}), t, [](int i) { return 0.25 * (i % 7); });
        g.put(replicated_layout(mesh, {3}), t, [](int) { return 0.0; });
      }
      g.put(replicated_layout(mesh, {2}), DType::f64, [](int) { return 1e-200; });
    };
    Bits all;
    for (const double p : {1.0, 2.0, 3.0, 7.0, kInf}) {
      List g(side);
      fill(g);
      keep(all, grad_norm(g.list, p, &side.compute));
      keep(all, clip_grad_norm(g.list, 1, p, NonFinite::error, &side.compute));
      g.keep_all(all);
      keep(all, clip_grad_norm(g.list, 1e9, p, NonFinite::error, &side.compute));
      g.keep_all(all);
    }
    return all;
  });
}

TEST(GradientsOnDevices, NormsThatAreNotFinite) {
  expect_the_same(3, [](const Side& side) {
    const DeviceMesh mesh(side.group, {{"tp", 3}});
    Bits all;
    for (const double wrong : {std::nan(""), kInf}) {
      List g(side);
      g.put(make_layout(mesh, {Shard{0}}, {6}), DType::f32, [](int) { return 1.0; });
      g.put(make_layout(mesh, {Shard{0}}, {6}), DType::bf16,
            [&](int i) { return side.rank.rank == 2 && i == 1 ? wrong : 1.0; });
      keep(all, clip_grad_norm(g.list, 1, 2, NonFinite::skip, &side.compute));
      g.keep_all(all);
      EXPECT_EQ(error_text(ErrorCode::bad_argument,
                           [&] { clip_grad_norm(g.list, 1, 2, NonFinite::error, &side.compute); }),
                "clip_grad_norm: the norm is " + std::string(std::isnan(wrong) ? "nan" : "inf") +
                    "; not finite on rank 2; of this rank: " + (side.rank.rank == 2 ? "\"g1\"" : "none"));
    }
    return all;
  });
}

// Work after a function on the stream waits for it, and it waits for earlier work: nothing else runs.
TEST(GradientsOnDevices, TheHostWaitsForNumbersAlone) {
  Context context;
  auto made = std::make_unique<LateDevice>(0);
  LateDevice& late = *made;
  context.add_device(std::move(made));
  add_late_gradients(context, late);
  Compute compute(context, 1, late.device());
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  BucketReducer reducer(mesh, {{"a", 6}, {"b", 6}}, {.compute = &compute});
  const Tensor bound = compute.zeros({6});
  reducer.bind(1, bound);
  const std::size_t before = late.waiting();
  for (int step = 0; step < 2; ++step) {
    reducer.ready(0);
    reducer.ready(1);
    reducer.finish();
  }
  EXPECT_EQ(late.waiting(), before + 4) << "two copies in, two back, and nobody waited";
  std::vector<Gradient> list = {{"b", bound.view()}};
  grad_norm(list, 2, &compute);
  EXPECT_LE(late.waiting(), 1u) << "for the norm; the memory of the sums goes back later";
}

TEST(GradientsOnDevices, WhatIsElsewhereIsNamed) {
  Context context;
  for (int i = 0; i < 2; ++i) context.add_device(std::make_unique<LateDevice>(i));
  const auto& late = dynamic_cast<LateDevice&>(context.device({DeviceKind::cuda, 0}));
  Compute here(context), there(context, 1, late.device()), other(context, 1, {DeviceKind::cuda, 1});
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  const Tensor a = here.zeros({4}), b = there.zeros({4}), c = other.zeros({4});
  const auto text = [](const auto& f) { return error_text(ErrorCode::bad_argument, f); };
  std::vector<Gradient> on_cpu = {{"a", a.view()}}, on_gpu = {{"b", b.view()}},
                        mixed = {{"b", b.view()}, {"c", c.view()}};
  EXPECT_EQ(error_text(ErrorCode::unsupported, [&] { grad_norm(on_gpu, 2, &there); }),
            "grad_norm: this Context has no gradient kernels of cuda:0; add_gradient_kernels() adds them");
  add_late_gradients(context, late);
  EXPECT_EQ(text([&] { grad_norm(on_gpu); }),
            "grad_norm: the gradient of \"b\" is on cuda:0; expected cpu, as no Compute was given");
  EXPECT_EQ(text([&] { grad_norm(on_gpu, 2, &here); }),
            "grad_norm: the gradient of \"b\" is on cuda:0; expected cpu, the device of the Compute");
  EXPECT_EQ(text([&] { clip_grad_norm(on_cpu, 1, 2, NonFinite::error, &there); }),
            "clip_grad_norm: the gradient of \"a\" is on cpu; expected cuda:0, the device of the Compute");
  EXPECT_EQ(text([&] { grad_norm(mixed, 2, &there); }),
            "grad_norm: the gradient of \"c\" is on cuda:1; expected cuda:0, the device of the Compute");
  EXPECT_EQ(text([&] { average_gradients(on_gpu, mesh); }),
            "average_gradients: the gradient of \"b\" is on cuda:0; expected cpu, as no Compute was given");
  EXPECT_EQ(
      text([&] { sync_replicated_gradients(on_gpu, mesh, {.compute = &other}); }),
      "sync_replicated_gradients: the gradient of \"b\" is on cuda:0; expected cuda:1, the device of the "
      "Compute");
  BucketReducer reducer(mesh, {{"w", 4}}, {.compute = &there}), plain(mesh, {{"w", 4}});
  EXPECT_EQ(text([&] { reducer.bind(0, a); }),
            "bucket_reducer: bind of \"w\": data is on cpu; expected cuda:0, the device of the Compute");
  EXPECT_EQ(text([&] { plain.bind(0, b); }),
            "bucket_reducer: bind of \"w\": data is on cuda:0; expected cpu, as no Compute was given");
  GradientKernels incomplete = late::gradient_kernels();
  incomplete.scale = nullptr;
  EXPECT_EQ(text([&] { add_gradient_kernels(context, other.device(), incomplete); }),
            "add_gradient_kernels: the table of cuda:1 has no scale");
  incomplete = late::gradient_kernels();
  incomplete.narrow = nullptr;
  EXPECT_EQ(text([&] { add_gradient_kernels(context, other.device(), incomplete); }),
            "add_gradient_kernels: the table of cuda:1 has no narrow");
  EXPECT_EQ(text([&] { add_gradient_kernels(context, late.device(), late::gradient_kernels()); }),
            "add_gradient_kernels: cuda:0 has its kernels already");
  EXPECT_EQ(text([&] { add_gradient_kernels(context, {}, late::gradient_kernels()); }),
            "add_gradient_kernels: cpu has its kernels already");
}

}  // namespace
}  // namespace weft::test::device_test
