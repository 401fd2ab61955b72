// Gradients: lists, options and functions.
#include <gtest/gtest.h>

#include <vector>

#include "agreement/row.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/dp/sharded_parameters.hpp"

namespace weft::agreement {
namespace dp_test {
namespace {

using test::Rank;

// The norm of one gradient, or its clipping.
Row of_norm(const std::string& function, const std::string& value, const std::string& text,
            const std::function<void(std::span<const Gradient>, bool odd)>& call) {
  return {function, value, "in the exchange of the sums", ErrorCode::mismatch, text, [call](Rank& r) {
            const DeviceMesh mesh(r.group(), {{"dp", r.size}});
            std::vector<float> v(4, 1.0f);
            const std::vector<Gradient> list{make_gradient("w", v.data(), replicated_layout(mesh, {4}))};
            call(list, r.rank == 1);
          }};
}

Rows norms() {
  using List = std::span<const Gradient>;
  return {
      of_norm("grad_norm", "p",
              "grad_norm: p 2 and no max_norm on dp rank 0, but p 1 and no max_norm on dp rank 1",
              [](List g, bool odd) { grad_norm(g, odd ? 1 : 2); }),
      of_norm("clip_grad_norm", "max_norm",
              "clip_grad_norm: p 2, max_norm 1 and non_finite error on dp rank 0, but p 2, max_norm 2 and "
              "non_finite error on dp rank 1",
              [](List g, bool odd) { clip_grad_norm(g, odd ? 2 : 1); }),
      of_norm("clip_grad_norm", "p", "clip_grad_norm: p 2, …, but p 1, ",
              [](List g, bool odd) { clip_grad_norm(g, 1, odd ? 1 : 2); }),
      of_norm("clip_grad_norm", "non_finite",
              "clip_grad_norm: …non_finite error on dp rank 0…non_finite skip on dp rank 1",
              [](List g, bool odd) { clip_grad_norm(g, 1, 2, odd ? NonFinite::skip : NonFinite::error); }),
      of_norm("clip_grad_norm", "whether to clip", "p 2 and no max_norm on dp rank 1",
              [](List g, bool odd) { static_cast<void>(odd ? grad_norm(g) : clip_grad_norm(g, 1)); }),
  };
}

// A list of one gradient: "a", or "b" on rank 1 if rank 1 gives another list.
struct Listed {
  Listed(Rank& r, const Placement& placement, bool other = false)
      : odd(r.rank == 1),
        mesh(r.group(), {{"dp", r.size}}),
        v(4, 1.0f),
        list{make_gradient(odd && other ? "b" : "a", v.data(), make_layout(mesh, {placement}, {4}))} {}
  bool odd;
  DeviceMesh mesh;
  std::vector<float> v;
  std::vector<Gradient> list;
};

Rows sums() {
  const std::string hashes = "in the exchange of the replicas' hashes",
                    lists = "in an exchange before the sums";
  return {
      {"reduce_gradients", "list of gradients", hashes, ErrorCode::mismatch,
       "reduce_gradients: gradient 0 is \"a\" …on dp rank 0, but \"b\" …on dp rank 1",
       [](Rank& r) {
         Listed g(r, Partial{}, true);
         reduce_gradients(g.list, g.mesh);
       }},
      {"reduce_gradients", "options.data_axes", hashes, ErrorCode::mismatch,
       "reduce_gradients: ranks gave different options: …data_axes none on dp rank 0…data_axes dp on dp rank "
       "1",
       [](Rank& r) {
         Listed g(r, Replicate{});
         reduce_gradients(g.list, g.mesh, {.data_axes = g.odd ? g.mesh["dp"] : DeviceMesh()});
       }},
      {"reduce_gradients", "options.on_drift", hashes, ErrorCode::mismatch,
       "reduce_gradients: ranks gave different options: …on_drift error on dp rank 0…on_drift average on dp "
       "rank 1",
       [](Rank& r) {
         Listed g(r, Replicate{});
         reduce_gradients(g.list, g.mesh, {.on_drift = g.odd ? OnDrift::average : OnDrift::error});
       }},
      {"reduce_gradients", "options.tolerance", hashes, ErrorCode::mismatch,
       "reduce_gradients: ranks gave different options: tolerance 0.25 …on dp rank 0, tolerance 0.5 …on dp "
       "rank 1",
       [](Rank& r) {
         Listed g(r, Replicate{});
         reduce_gradients(g.list, g.mesh, {.tolerance = g.odd ? 0.5 : 0.25});
       }},
      {"sync_replicated_gradients", "list of gradients", hashes, ErrorCode::mismatch,
       "sync_replicated_gradients: gradient 0 is \"a\" …on dp rank 0, but \"b\" …on dp rank 1",
       [](Rank& r) {
         Listed g(r, Partial{}, true);
         sync_replicated_gradients(g.list, g.mesh);
       }},
      {"sync_replicated_gradients", "options.on_drift", hashes, ErrorCode::mismatch,
       "sync_replicated_gradients: ranks gave different options: …on_drift error on dp rank 0…on_drift "
       "average on dp rank 1",
       [](Rank& r) {
         Listed g(r, Replicate{});
         sync_replicated_gradients(g.list, g.mesh, {.on_drift = g.odd ? OnDrift::average : OnDrift::error});
       }},
      {"sync_replicated_gradients", "options.tolerance", hashes, ErrorCode::mismatch,
       "sync_replicated_gradients: ranks gave different options: tolerance 0.25 …on dp rank 0, tolerance 0.5 "
       "…on dp rank 1",
       [](Rank& r) {
         Listed g(r, Replicate{});
         sync_replicated_gradients(g.list, g.mesh, {.tolerance = g.odd ? 0.5 : 0.25});
       }},
      {"average_gradients", "list of gradients", lists, ErrorCode::mismatch,
       "average_gradients: gradient 0 is \"a\" …on dp rank 0, but \"b\" …on dp rank 1",
       [](Rank& r) {
         Listed g(r, Partial{}, true);
         average_gradients(g.list, g.mesh);
       }},
  };
}

Rows buckets() {
  const std::string where = "in the first step";
  return {
      {"BucketReducer::finish", "entries", where, ErrorCode::mismatch,
       "bucket_reducer: gradient 0 is \"a\" (f32 x2 sum) on dp rank 0, but \"a\" (f32 x3 sum) on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         BucketReducer(mesh, {{"a", r.rank == 1 ? 3 : 2}}).finish();
       }},
      {"BucketReducer::finish", "options.bucket_bytes", where, ErrorCode::mismatch,
       "bucket_reducer: the reducer is number 0 with bucket_bytes 4, unused zeros and no hook on dp rank 0, "
       "but …bucket_bytes 8, ",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         BucketReducer(mesh, {{"a", 2}}, {.bucket_bytes = r.rank == 1 ? 8 : 4, .unused = Unused::zeros})
             .finish();
       }},
      {"BucketReducer::finish", "options.unused", where, ErrorCode::mismatch,
       "bucket_reducer: …unused zeros and no hook on dp rank 0…unused error and no hook on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         BucketReducer(mesh, {{"a", 2}}, {.unused = r.rank == 1 ? Unused::error : Unused::zeros}).finish();
       }},
      {"BucketReducer::finish", "options.hook, by its name", where, ErrorCode::mismatch,
       "bucket_reducer: …on dp rank 0…on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         BucketReducer(mesh, {{"a", 2}},
                       {.unused = Unused::zeros, .hook = r.rank == 1 ? bf16_hook(r.context) : BucketHook{}})
             .finish();
       }},
      {"ShardedParameters::unshard", "entries", where, ErrorCode::mismatch,
       "sharded_parameters: tensor 0 is \"a\"…but \"b\"",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         ShardedParameters shards(mesh["dp"], {{r.rank == 1 ? "b" : "a", replicated_layout(mesh, {4})}});
         const Tensor own(r.context, {2});
         shards.unshard(std::vector<ConstTensorView>{own});
       }},
      {"ShardedParameters::reduce_scatter", "options", where, ErrorCode::mismatch,
       "sharded_parameters: …alone_bytes 1 on dp rank 0…alone_bytes 2 on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         ShardedParameters shards(mesh["dp"], {{"a", replicated_layout(mesh, {4})}},
                                  {.alone_bytes = r.rank + 1});
         shards.reduce_scatter(shards.make_gradients());
       }},
      {"ShardedParameters::reduce_scatter", "op", "with the call", ErrorCode::mismatch,
       "reduce_scatter…sum…avg",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         ShardedParameters shards(mesh["dp"], {{"a", replicated_layout(mesh, {4})}});
         const Tensor gradients = shards.make_gradients();
         for (float& v : gradients.f32()) v = 1;
         shards.reduce_scatter(gradients, r.rank == 1 ? ReduceOp::avg : ReduceOp::sum);
       }},
  };
}

}  // namespace
}  // namespace dp_test

Rows dp_rows() {
  using namespace dp_test;
  Rows rows;
  for (const Rows& some : {norms(), sums(), buckets()}) rows.insert(rows.end(), some.begin(), some.end());
  return rows;
}

TEST(AgreementOfGradients, EachRankIsTold) { expect_told(dp_rows()); }

}  // namespace weft::agreement
