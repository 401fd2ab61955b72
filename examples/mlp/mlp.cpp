// A column/row MLP, y = row(column(x)), on a program's own buffers, forward and backward; also computed on
// one rank, to compare.
//   weft run -n 4 -- ./mlp
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "weft/tp/linear.hpp"
#include "weft/weft.hpp"

namespace {
using Floats = std::vector<float>;
constexpr std::int64_t kTokens = 64, kIn = 96, kHidden = 192, kOut = 48;

Floats numbers(int tensor, std::int64_t rows, std::int64_t columns) {
  Floats v(static_cast<std::size_t>(rows * columns));
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = std::sin(static_cast<float>(i * 37 + static_cast<std::size_t>(tensor)));
  return v;
}
weft::TensorView matrix(Floats& v, std::int64_t rows, std::int64_t columns) {
  return weft::view(v.data(), {rows, columns});
}

// One MLP, of which this rank holds `part` hidden features, beginning at `begin`. The other ranks of `axes`
// hold the rest.
struct Mlp {
  Mlp(weft::Compute& compute_in, weft::DeviceMesh axes_in, std::int64_t begin, std::int64_t part_in)
      : compute(compute_in), axes(std::move(axes_in)), part(part_in) {
    const Floats whole1 = numbers(1, kHidden, kIn), whole2 = numbers(2, kOut, kHidden);
    w1.assign(whole1.begin() + begin * kIn, whole1.begin() + (begin + part) * kIn);
    for (std::int64_t o = 0; o < kOut; ++o)
      w2.insert(w2.end(), whole2.begin() + o * kHidden + begin, whole2.begin() + o * kHidden + begin + part);
  }
  void step() {
    column_linear_forward(compute, matrix(x, kTokens, kIn), matrix(w1, part, kIn), {},
                          matrix(h, kTokens, part));
    row_linear_forward(compute, axes, matrix(h, kTokens, part), matrix(w2, kOut, part), weft::view(b),
                       matrix(y, kTokens, kOut));
    row_linear_backward(compute, matrix(y, kTokens, kOut), matrix(h, kTokens, part), matrix(w2, kOut, part),
                        {.dx = matrix(dh, kTokens, part), .db = weft::view(db)});
    column_linear_backward(compute, axes, matrix(dh, kTokens, part), matrix(x, kTokens, kIn),
                           matrix(w1, part, kIn), {.dx = matrix(dx, kTokens, kIn)});
  }

  weft::Compute& compute;
  weft::DeviceMesh axes;
  std::int64_t part;
  Floats w1, w2, x = numbers(3, kTokens, kIn), b = numbers(4, 1, kOut), h = Floats(kTokens * part), dh = h;
  Floats y = Floats(kTokens * kOut), dx = Floats(kTokens * kIn), db = Floats(kOut);
};

double distance(const Floats& a, const Floats& b) {
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
  }
  return most / largest;
}
}  // namespace

int main() {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  if (kHidden % group.size() != 0) {
    if (group.rank() == 0)
      std::printf("mlp: %d ranks do not divide the %d hidden features\n", group.size(),
                  static_cast<int>(kHidden));
    return 2;
  }
  const weft::DeviceMesh mesh(group, {{"tp", group.size()}});
  weft::Compute compute(context);
  const std::int64_t part = kHidden / group.size();
  Mlp parallel(compute, mesh["tp"], part * group.rank(), part);
  Mlp serial(compute, weft::DeviceMesh::arithmetic(context, weft::MeshShape{{"tp", 1}}, 0)["tp"], 0, kHidden);
  parallel.step();
  serial.step();
  const bool same = distance(parallel.y, serial.y) < 1e-5 && distance(parallel.dx, serial.dx) < 1e-5 &&
                    distance(parallel.db, serial.db) < 1e-5;
  if (group.rank() == 0)
    std::printf("%d ranks: y, dx and db %s the serial ones\n", group.size(), same ? "equal" : "differ from");
  return same ? 0 : 1;
}
