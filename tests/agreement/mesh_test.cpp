// Meshes, layouts and windows.
#include <gtest/gtest.h>

#include <vector>

#include "agreement/row.hpp"
#include "weft/mesh/halo.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/replicas.hpp"
#include "weft/mesh/window.hpp"

namespace weft::agreement {
namespace mesh_test {
namespace {

using test::Rank;

// A tensor of the layout that holds this rank's number.
Tensor filled(Rank& r, const LayoutRef& layout) {
  Tensor t(r.context, layout->local_shape());
  for (float& v : t.f32()) v = static_cast<float>(r.rank);
  return t.with_layout(layout);
}

Rows meshes() {
  return {
      {"DeviceMesh::group", "shape of the mesh", "when the first group of the mesh is made",
       ErrorCode::mismatch,
       "mesh: rank …(mesh 0 of that group); expected the same on all ranks…dp=4 x tp=1…dp=2 x tp=2",
       [](Rank& r) {
         DeviceMesh mesh(r.group(),
                         r.rank == 1 ? MeshShape{{"dp", 4}, {"tp", 1}} : MeshShape{{"dp", 2}, {"tp", 2}});
         r.meet("made");
         mesh["dp"].group();
         r.group().barrier().wait();
       },
       4},
      {"DeviceMesh::group", "order of its axes", "when the first group of the mesh is made",
       ErrorCode::mismatch, "mesh: rank …expected the same on all ranks…a=2 x b=2…b=2 x a=2",
       [](Rank& r) {
         DeviceMesh mesh(r.group(),
                         r.rank == 1 ? MeshShape{{"a", 2}, {"b", 2}} : MeshShape{{"b", 2}, {"a", 2}});
         mesh["a"].group();
         r.group().barrier().wait();
       },
       4},
  };
}

Rows layouts() {
  const std::string with = "with the call";
  return {
      {"full", "shape of the whole", with, ErrorCode::mismatch,
       "redistribute: (…all_gather f32 x16 …their layouts differ",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         full(filled(r, make_layout(mesh, {Shard{0}}, r.rank == 1 ? Shape{8, 4} : Shape{4, 8})));
       }},
      {"redistribute", "layout before", with, ErrorCode::mismatch,
       "redistribute: (4, 4) as [dp: Shard(…all_gather f32 x8 …their layouts differ",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         redistribute(filled(r, make_layout(mesh, {Shard{r.rank}}, {4, 4})), mesh["dp"], Replicate{});
       }},
      {"start_redistribute", "layout after", with, ErrorCode::mismatch,
       "redistribute: (4, 4) as [dp: Partial(sum)] to …reduce_scatter f32 x8 sum …their layouts differ",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         start_redistribute(filled(r, make_layout(mesh, {Partial{}}, {4, 4})), mesh["dp"], Shard{r.rank})
             .finish();
       }},
      {"check_replicas", "list of tensors", "in the exchange of the hashes", ErrorCode::mismatch,
       "check_replicas: tensor 0 is \"a\" (f32 (4) as [dp: Replicate]) on dp rank 0, but \"b\" (f32 (4) as "
       "[dp: Replicate]) on dp rank 1",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         const Tensor t = filled(r, replicated_layout(mesh, {4}));
         check_replicas(std::vector<NamedView>{{r.rank == 1 ? "b" : "a", t.view(), t.layout()}}, mesh);
       }},
      {"check_replicas", "values of a replica", "in the exchange of the hashes", ErrorCode::mismatch,
       "check_replicas: \"a\" is Replicate on dp=3, but on dp rank 1 it has other bits",
       [](Rank& r) {
         const DeviceMesh mesh(r.group(), {{"dp", r.size}});
         const Tensor t = filled(r, replicated_layout(mesh, {4}));
         for (float& v : t.f32()) v = r.rank == 1 ? 2.0f : 1.0f;
         check_replicas(std::vector<NamedView>{{"a", t.view(), t.layout()}}, mesh);
       },
       3},
  };
}

// A window on 4 elements over two ranks: its layout, and memory.
struct Windowed {
  explicit Windowed(Rank& r)
      : odd(r.rank == 1),
        mesh(r.group(), {{"y", r.size}}),
        x(make_layout(mesh, {Shard{0}}, {4})),
        in(2, 1.0),
        out(4),
        cells(8) {}
  Tensor tensor(Rank& r) const { return filled(r, make_layout(mesh, {Shard{0}}, {4})); }
  std::vector<WindowDim> halo(const Edge& edge) const { return {WindowDim::halo(x, 0, 1, 1, edge)}; }
  Edge edge() const { return odd ? Edge::reflect() : Edge::zero(); }
  bool odd;
  DeviceMesh mesh;
  Partition x;
  std::vector<double> in, out, cells;
};

Rows windows() {
  const std::string where = "in the first exchange of a plan";
  const std::string edges =
      "window: the edge before dimension 0 is reflect on rank 1 and zero on rank 0; expected the same on all "
      "ranks";
  return {
      {"Window::start", "edge rules", where, ErrorCode::mismatch, edges,
       [](Rank& r) {
         Windowed w(r);
         Window(w.x, w.halo(w.edge())).start(view(w.in), view(w.out)).finish();
       }},
      {"Window::start", "what the parts want", where, ErrorCode::mismatch,
       "window: what part 0 wants of dimension 0 is …expected the same on all ranks",
       [](Rank& r) {
         Windowed w(r);
         const Window window(w.x, {WindowDim::halo(w.x, 0, 1, w.odd ? 2 : 1, Edge::zero())});
         window.start(view(w.in), view(w.cells.data(), {w.odd ? 5 : 4})).finish();
       }},
      {"Window::start", "fields: their number, dtypes and sizes", where, ErrorCode::mismatch,
       "window: the list of fields is …i32…expected the same on all ranks",
       [](Rank& r) {
         Windowed w(r);
         const Window window(w.x, w.halo(Edge::zero()));
         std::vector<std::int32_t> in(2), out(4);
         if (w.odd)
           window.start(view(in), view(out)).finish();
         else
           window.start(view(w.in), view(w.out)).finish();
       }},
      {"Window::start_adjoint", "edge rules", where, ErrorCode::mismatch, edges,
       [](Rank& r) {
         Windowed w(r);
         Window(w.x, w.halo(w.edge())).start_adjoint(view(w.out), view(w.in)).finish();
       }},
      {"Halo::start", "ghost cells", where, ErrorCode::mismatch,
       "halo: what part 0 wants of dimension 0 is …expected the same on all ranks",
       [](Rank& r) {
         Windowed w(r);
         const Halo halo(w.x, {{0, 1, w.odd ? 2 : 1, Edge::zero()}});
         halo.start(view(w.cells.data(), {w.odd ? 5 : 4})).finish();
       }},
      {"fetch_window", "edge rules", where, ErrorCode::mismatch, edges,
       [](Rank& r) {
         const Windowed w(r);
         fetch_window(w.tensor(r), w.halo(w.edge()));
       }},
      {"start_fetch_window", "edge rules", where, ErrorCode::mismatch, edges,
       [](Rank& r) {
         const Windowed w(r);
         start_fetch_window(w.tensor(r), w.halo(w.edge())).finish();
       }},
      {"fetch_window_adjoint", "edge rules", where, ErrorCode::mismatch, edges,
       [](Rank& r) {
         const Windowed w(r);
         const Tensor window(r.context, {4});
         fetch_window_adjoint(window, make_layout(w.mesh, {Shard{0}}, {4}), w.halo(w.edge()));
       }},
  };
}

}  // namespace
}  // namespace mesh_test

Rows mesh_rows() {
  using namespace mesh_test;
  Rows rows;
  for (const Rows& some : {meshes(), layouts(), windows()}) rows.insert(rows.end(), some.begin(), some.end());
  return rows;
}

TEST(AgreementOfMeshes, EachRankIsTold) { expect_told(mesh_rows()); }

}  // namespace weft::agreement
