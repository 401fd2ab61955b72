// Halos of ranks of weft in a ring: the faces of both neighbours in one exchange, by bytes and memory: rows, columns, and the rows of eight fields.
//
//   halo_bench --op halo_rows,halo_columns,halo_fields --memory shared,foreign
#include <array>
#include <memory>
#include <vector>

#include "harness.hpp"
#include "weft/mesh/window.hpp"

namespace weft::bench {
namespace {

// Each rank holds two faces of the ring and wants the one before them and the one after.
std::function<void(std::byte*, std::byte*)> call_of(const DeviceMesh& mesh, const Case& c) {
  const bool columns = c.kind == Kind::halo_columns;
  const std::int64_t fields = c.kind == Kind::halo_fields ? kHaloFields : 1, face = c.block() / fields / 2,
                     n = mesh.size();
  const int dim = columns ? 1 : 0;
  const Shape whole = columns ? Shape{face, 2 * n} : Shape{2 * n, face},
              part = columns ? Shape{face, 2} : Shape{2, face};
  WindowDim want{dim, {}, Edge::periodic(), Edge::periodic()};
  for (std::int64_t p = 0; p < n; ++p) want.wanted.push_back({{2 * p - 1, 2 * p}, {2 * p + 2, 2 * p + 3}});
  const auto window =
      std::make_shared<const Window>(Partition(make_layout(mesh, {Shard{dim}}, whole)), std::vector{want});
  const std::int64_t of_field = part.count() * size_bytes(c.dtype);
  const WindowField view{{nullptr, c.dtype, {}, part, row_major(part)}, {nullptr, c.dtype, {}, part, row_major(part)}};
  const auto list = std::make_shared<std::vector<WindowField>>(static_cast<std::size_t>(fields), view);
  return [=](std::byte* in, std::byte* out) {
    for (std::int64_t f = 0; f < fields; ++f) {
      WindowField& field = (*list)[static_cast<std::size_t>(f)];
      field.in.data = in + f * of_field;
      field.out.data = out + f * of_field;
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
  return weft::bench::bench_main(
      argc, argv, {{Kind::halo_rows, Kind::halo_columns, Kind::halo_fields}, {"shared", "foreign"}},
      weft::bench::table, weft::bench::settings_of);
}
