// A convolution of maps that are cut in rows over the ranks: how long its step takes beside what it consists of.
//
//   conv_bench --maps 32x64x128,8x16x16 --passes forward,both --ranks 2
//
// A map: channels x rows of each rank x columns; kernel 3, padding 1, as many channels out. For each case:
//   median_us    forward (and backward) of the split layer
//   local_us     the same layer on this rank's rows by themselves, on all ranks at once: the interior and no exchange
//   exchange_us  the windows that the passes fetch, with plans that are made: one on x, and one on dy
//   over         median_us / max(local_us, exchange_us)
// y and dx are compared with those of the whole map on one rank, bit for bit. One thread a rank.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "inputs.hpp"
#include "program.hpp"
#include "weft/base/error.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/window.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/init.hpp"

namespace weft::bench {
namespace {

struct MapSize {
  std::int64_t channels, rows, columns;
};
struct What {
  std::vector<std::string> maps = {"8x16x16", "32x64x128", "64x32x64", "16x256x256"};
  std::vector<std::string> passes = {"forward", "both"};
};

MapSize size_from(const std::string& text) {
  MapSize s{};
  char rest = 0;
  if (std::sscanf(text.c_str(), "%ldx%ldx%ld%c", &s.channels, &s.rows, &s.columns, &rest) != 3 ||
      s.channels < 1 || s.rows < 1 || s.columns < 1)
    throw Error(ErrorCode::bad_argument,
                "--maps " + text + ": expected channels x rows of each rank x columns: 32x64x128");
  return s;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.bytes())) == 0;
}

// One layer with what its passes need.
struct Layer {
  Layer(Compute& compute_in, const MapSize& s, bool both_in) : compute(compute_in), both(both_in) {
    conv = std::make_unique<Conv2d>(
        Conv2dConfig{.in = s.channels, .out = s.channels, .kernel = 3, .padding = 1});
  }
  void set_up() {
    materialise(*conv, compute);
    initialise(*conv, 1);
  }
  void run() {
    for (Parameter* p : conv->parameters()) p->zero_gradient();
    Frame frame = both ? Frame(compute) : Frame::inference(compute);
    y = conv->forward(x, frame)[0];
    if (both) dx = conv->backward(dy, frame)[0];
  }
  Compute& compute;
  bool both;
  std::unique_ptr<Conv2d> conv;
  Tensor x, dy, y, dx;
};

Numbers measured(RankOfBench& rank, const DeviceMesh& mesh, const MapSize& s, bool both, const Agree& agree,
                 double seconds) {
  const auto compute = std::make_shared<Compute>(rank.context, 1);
  const Shape whole{1, s.channels, s.rows * mesh.size(), s.columns}, part{1, s.channels, s.rows, s.columns};
  const Tensor x = numbers(rank.context, whole, kX, 2.0f), dy = numbers(rank.context, whole, kDy, 2.0f);
  const auto split = std::make_shared<Layer>(*compute, s, both),
             local = std::make_shared<Layer>(*compute, s, both);
  const DomainManager manager = apply_domain_parallel(*split->conv, mesh);
  replicate(*split->conv, mesh);
  for (Layer* layer : {&*split, &*local}) layer->set_up();
  split->x = shard_spatial(x, manager);
  split->dy = shard_spatial(dy, manager);
  local->x = Tensor(rank.context, part);
  local->dy = Tensor(rank.context, part);
  std::copy(split->x.f32().begin(), split->x.f32().end(), local->x.f32().begin());
  std::copy(split->dy.f32().begin(), split->dy.f32().end(), local->dy.f32().begin());

  const auto as_one_rank = [&rank, split, compute, s, both, x, dy]() -> std::string {
    Layer serial(*compute, s, both);
    serial.set_up();
    serial.x = x, serial.dy = dy;
    serial.run();
    if (!same_bits(split->y, distribute(serial.y, split->y.layout())))
      return "y has other bits than on one rank";
    if (both && !same_bits(split->dx, distribute(serial.dx, split->dx.layout())))
      return "dx has other bits than on one rank";
    return "";
  };
  const Times step = measure({[split] { split->run(); }, as_one_rank}, agree, seconds);
  const auto fine = [] { return std::string(); };
  const Times alone = measure({[local] { local->run(); }, fine}, agree, seconds);
  const Window window(Partition(split->x.layout()),
                      {WindowDim::halo(split->x.layout(), 2, 1, 1, Edge::zero())});
  const Tensor seen = compute->make(window.window_shape(part), DType::f32, Memory::shared);
  const Times exchange = measure({[&] {
                                    window.fetch(split->x, seen);
                                    if (both) window.fetch(split->dy, seen);
                                  },
                                  fine},
                                 agree, seconds);
  return {{"median_us", step.median_us},
          {"p99_us", step.p99_us},
          {"local_us", alone.median_us},
          {"exchange_us", exchange.median_us},
          {"over", step.median_us / std::max(alone.median_us, exchange.median_us)},
          {"samples", static_cast<double>(step.samples)}};
}

std::vector<TableRow> table(RankOfBench& rank, const What& what) {
  const auto mesh = std::make_shared<const DeviceMesh>(rank.group, MeshShape{{"h", -1}});
  std::vector<TableRow> rows;
  for (const std::string& map : what.maps)
    for (const std::string& pass : what.passes) {
      TableRow row;
      row.name = "conv/" + map + "/" + pass;
      row.row = {{{"op", "conv"}, {"case", map + "/" + pass}}, rank.spec.ranks, 0, {}};
      row.measure = [&rank, mesh, s = size_from(map), both = pass == "both"](const Agree& agree,
                                                                             double seconds) {
        return measured(rank, *mesh, s, both, agree, seconds);
      };
      rows.push_back(std::move(row));
    }
  return rows;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  What what;
  const auto take_maps = [&](const std::string& text) {
    what.maps.clear();
    for (std::size_t at = 0; at <= text.size();) {
      const std::size_t end = std::min(text.find(',', at), text.size());
      what.maps.push_back(text.substr(at, end - at));
      size_from(what.maps.back());
      at = end + 1;
    }
  };
  return program_main(
      argc, argv, {{"--maps", take_maps}, words_flag("--passes", what.passes, {"forward", "both"})},
      [&](RankOfBench& rank) { return table(rank, what); },
      [](const Spec& spec) { return settings_of(spec) + ", one thread a rank"; });
}
