// Halo exchanges of weft's ranks in a ring, by bytes and memory. One exchange gets the faces of both
// neighbours: rows and columns of matrices, or faces of cuboids, of one field or of eight.
//
//   halo_bench --op halo_rows,halo_3d_fields --memory shared,foreign
#include <memory>
#include <vector>

#include "harness.hpp"
#include "weft/mesh/window.hpp"

namespace weft::bench {
namespace {

// Each rank holds two faces of the ring, and needs the face before them and the face after them.
std::function<void(std::byte*, std::byte*)> call_of(const DeviceMesh& mesh, const Case& c) {
  const Case::Faces faces = c.faces();
  const std::int64_t fields = faces.fields, runs = faces.runs, run = faces.run;
  const std::int64_t n = mesh.size(), wide = c.kind == Kind::halo_four_columns ? 4 : 1;
  const bool rows = c.kind == Kind::halo_rows || c.kind == Kind::halo_fields;
  const bool cuboid = c.kind == Kind::halo_3d || c.kind == Kind::halo_3d_fields;
  const int dim = rows ? 0 : 1;
  const auto shape_of = [&](std::int64_t count) {
    return rows ? Shape{count, run} : cuboid ? Shape{runs, count, run} : Shape{runs, count * wide};
  };
  const Shape whole = shape_of(2 * n), part = shape_of(2);
  WindowDim want{dim, {}, Edge::periodic(), Edge::periodic()};
  for (std::int64_t p = 0; p < n; ++p)
    want.wanted.push_back({{(2 * p - 1) * wide, 2 * p * wide}, {(2 * p + 2) * wide, (2 * p + 3) * wide}});
  const auto window =
      std::make_shared<const Window>(Partition(make_layout(mesh, {Shard{dim}}, whole)), std::vector{want});
  const std::int64_t of_field = part.count() * size_bytes(c.dtype);
  const WindowField view{{nullptr, c.dtype, {}, part, row_major(part)},
                         {nullptr, c.dtype, {}, part, row_major(part)}};
  const auto list = std::make_shared<std::vector<WindowField>>(static_cast<std::size_t>(fields), view);
  return [=](std::byte* in, std::byte* out) {
    std::int64_t at = 0;
    for (WindowField& field : *list) {
      field.in.data = in + at;
      field.out.data = out + at;
      at += of_field;
    }
    window->start(*list).finish();
  };
}

std::vector<TableRow> table(RankOfBench& rank) {
  const auto mesh = std::make_shared<const DeviceMesh>(rank.group, MeshShape{{"ring", -1}});
  return table_of(rank.spec, [&rank, mesh](TableRow& row, const Case& c, const std::string& memory) {
    row.measure = [c, memory, mesh, &rank](const Agree& agree, double seconds) {
      const auto buffers = std::make_shared<Buffers>(c, rank.group.rank(), allocator(rank.context, memory));
      const Times t = measure(prepare(buffers, call_of(*mesh, c)), agree, seconds);
      Row numbers;
      add_times(numbers, t, c.moved_bytes(), 1);
      return numbers.numbers;
    };
  });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using weft::bench::Kind;
  return weft::bench::bench_main(argc, argv,
                                 {{Kind::halo_rows, Kind::halo_columns, Kind::halo_four_columns,
                                   Kind::halo_3d, Kind::halo_fields, Kind::halo_3d_fields},
                                  {"shared", "foreign"}},
                                 weft::bench::table, weft::bench::settings_of);
}
