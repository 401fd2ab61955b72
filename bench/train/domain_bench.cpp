// Layers on maps and sequences that are sharded over the ranks: compares the time of a step with the times of
// its parts.
//
//   domain_bench --maps 32x64x128,8x16x16 --sequences 1024,4096 --passes forward,both --ranks 2
//
// A map is given as channels x rows of each rank x columns; the layer is a convolution of kernel 3, padding
// 1, with as many output channels. For each case:
//   median_us    forward (and backward) of the split layer
//   local_us     the same layer on this rank's rows by themselves, on all ranks at once: the interior and no exchange
//   exchange_us  the windows that the passes fetch, with plans that are made: one on x, and one on dy
//   over         median_us / max(local_us, exchange_us)
// A sequence is given as the positions of all ranks together; the layer is causal attention with 8 heads of
// 64.
//   median_us    forward (and backward) of the split layer
//   serial_us    the whole sequence on one rank; all ranks compute it at once
//   gain         serial_us / median_us
// The program measures both in five turns, one after the other in each turn, because a shared machine is
// sometimes slower for some tenths of a second. The times are medians of the turns' medians; `over` and
// `gain` are medians of the turns' ratios. The program compares y and dx with those of one rank, bit for bit.
// One thread per rank.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "inputs.hpp"
#include "program.hpp"
#include "turns.hpp"
#include "weft/base/error.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/window.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/init.hpp"

namespace weft::bench {
namespace {

struct MapSize {
  std::int64_t channels, rows, columns;
};
struct What {
  std::vector<std::string> maps = {"8x16x16", "32x64x128", "64x32x64", "16x256x256"};
  std::vector<std::string> sequences = {"1024", "4096"};
  std::vector<std::string> passes = {"forward", "both"};
  int rounds = 1;
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

std::int64_t positions_from(const std::string& text) {
  char rest = 0;
  std::int64_t n = 0;
  if (std::sscanf(text.c_str(), "%ld%c", &n, &rest) != 1 || n < 1)
    throw Error(ErrorCode::bad_argument, "--sequences " + text + ": expected a number of positions: 4096");
  return n;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.bytes())) == 0;
}

// One layer with the data that its passes need.
struct Layer {
  Layer(Compute& compute_in, std::unique_ptr<Module> module_in, bool both_in)
      : compute(compute_in), both(both_in), module(std::move(module_in)) {}
  void set_up() {
    materialise(*module, compute);
    initialise(*module, 1);
  }
  void run() {
    for (Parameter* p : module->parameters()) p->zero_gradient();
    Frame frame = both ? Frame(compute) : Frame::inference(compute);
    y = module->forward(x, frame)[0];
    if (both) dx = module->backward(dy, frame)[0];
  }
  Compute& compute;
  bool both;
  std::unique_ptr<Module> module;
  Tensor x, dy, y, dx;
};

std::unique_ptr<Module> conv_of(const MapSize& s) {
  return std::make_unique<Conv2d>(
      Conv2dConfig{.in = s.channels, .out = s.channels, .kernel = 3, .padding = 1});
}

constexpr std::int64_t kDim = 512;
std::unique_ptr<Module> attention_of(std::int64_t positions) {
  return std::make_unique<Attention>(AttentionConfig{.dim = kDim, .heads = 8, .kv_heads = 8, .head_dim = 64},
                                     RopeTables::make(positions, 64, 10000.0));
}

// Compares `split` with the unsharded layer on one rank. Returns a description of the difference, or "".
std::string compared(const Layer& split, const Layer& serial) {
  if (!same_bits(split.y, distribute(serial.y, split.y.layout()))) return "y has other bits than on one rank";
  if (split.both && !same_bits(split.dx, distribute(serial.dx, split.dx.layout())))
    return "dx has other bits than on one rank";
  return "";
}
std::string fine() { return {}; }

Numbers measured_conv(RankOfBench& rank, const DeviceMesh& mesh, const MapSize& s, bool both,
                      const Agree& agree, double seconds) {
  const auto compute = std::make_shared<Compute>(rank.context, 1);
  const Shape whole{1, s.channels, s.rows * mesh.size(), s.columns}, part{1, s.channels, s.rows, s.columns};
  const Tensor x = numbers(rank.context, whole, kX, 2.0f), dy = numbers(rank.context, whole, kDy, 2.0f);
  const auto split = std::make_shared<Layer>(*compute, conv_of(s), both),
             local = std::make_shared<Layer>(*compute, conv_of(s), both);
  const DomainManager manager = apply_domain_parallel(*split->module, mesh);
  replicate(*split->module, mesh);
  for (Layer* layer : {&*split, &*local}) layer->set_up();
  split->x = shard_spatial(x, manager);
  split->dy = shard_spatial(dy, manager);
  local->x = Tensor(rank.context, part);
  local->dy = Tensor(rank.context, part);
  std::copy(split->x.f32().begin(), split->x.f32().end(), local->x.f32().begin());
  std::copy(split->dy.f32().begin(), split->dy.f32().end(), local->dy.f32().begin());

  const auto as_one_rank = [split, compute, s, both, x, dy] {
    Layer serial(*compute, conv_of(s), both);
    serial.set_up();
    serial.x = x, serial.dy = dy;
    serial.run();
    return compared(*split, serial);
  };
  const Window window(Partition(split->x.layout()),
                      {WindowDim::halo(split->x.layout(), 2, 1, 1, Edge::zero())});
  const Tensor seen = compute->make(window.window_shape(part), DType::f32, Memory::shared);
  const auto fetch_both = [&] {
    window.fetch(split->x, seen);
    if (both) window.fetch(split->dy, seen);
  };
  const TimedTurns turns(
      {{[split] { split->run(); }, as_one_rank}, {[local] { local->run(); }, fine}, {fetch_both, fine}},
      agree, seconds);
  const auto& us = turns.us;
  return {{"median_us", median(us[0])},
          {"p99_us", turns.p99_us},
          {"local_us", median(us[1])},
          {"exchange_us", median(us[2])},
          {"over", turns.over_turns([&](std::size_t i) { return us[0][i] / std::max(us[1][i], us[2][i]); })},
          {"samples", static_cast<double>(turns.samples)}};
}

Numbers measured_attention(RankOfBench& rank, const DeviceMesh& mesh, std::int64_t positions, bool both,
                           const Agree& agree, double seconds) {
  const auto compute = std::make_shared<Compute>(rank.context, 1);
  const auto split = std::make_shared<Layer>(*compute, attention_of(positions), both),
             serial = std::make_shared<Layer>(*compute, attention_of(positions), both);
  const DomainManager manager = apply_domain_parallel(*split->module, mesh, {.dims = {1}});
  replicate(*split->module, mesh);
  for (Layer* layer : {&*split, &*serial}) layer->set_up();
  serial->x = numbers(rank.context, {1, positions, kDim}, kX, 2.0f);
  serial->dy = numbers(rank.context, {1, positions, kDim}, kDy, 2.0f);
  split->x = distribute(serial->x, manager.layout(serial->x.shape()));
  split->dy = distribute(serial->dy, manager.layout(serial->dy.shape()));
  serial->run();
  const TimedTurns turns({{[split] { split->run(); }, [split, serial] { return compared(*split, *serial); }},
                          {[serial] { serial->run(); }, fine}},
                         agree, seconds);
  const auto& us = turns.us;
  return {{"median_us", median(us[0])},
          {"p99_us", turns.p99_us},
          {"serial_us", median(us[1])},
          {"gain", turns.over_turns([&](std::size_t i) { return us[1][i] / us[0][i]; })},
          {"samples", static_cast<double>(turns.samples)}};
}

std::vector<TableRow> table(RankOfBench& rank, const What& what) {
  const auto mesh = std::make_shared<const DeviceMesh>(rank.group, MeshShape{{"h", -1}});
  std::vector<TableRow> rows;
  const auto add = [&](const std::string& name, auto measured) {
    for (const std::string& pass : what.passes) {
      TableRow row;
      row.name = name + "/" + pass;
      row.row = {{{"op", "domain"}, {"case", row.name}}, rank.spec.ranks, 0, {}};
      row.measure = [&rank, mesh, measured, both = pass == "both"](const Agree& agree, double seconds) {
        return measured(rank, *mesh, both, agree, seconds);
      };
      rows.push_back(std::move(row));
    }
  };
  for (int round = 0; round < what.rounds; ++round) {
    for (const std::string& map : what.maps)
      add("conv/" + map,
          [s = size_from(map)](RankOfBench& r, const DeviceMesh& m, bool both, const Agree& agree,
                               double seconds) { return measured_conv(r, m, s, both, agree, seconds); });
    for (const std::string& sequence : what.sequences)
      add("attention/" + sequence,
          [n = positions_from(sequence)](RankOfBench& r, const DeviceMesh& m, bool both, const Agree& agree,
                                         double seconds) {
            return measured_attention(r, m, n, both, agree, seconds);
          });
  }
  return rows;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  What what;
  // Splits "a,b" into words, and passes each word to `check`; "" gives no words.
  const auto words = [](std::vector<std::string>& to, auto check) {
    return [&to, check](const std::string& text) {
      to.clear();
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find(',', at), text.size());
        to.push_back(text.substr(at, end - at));
        check(to.back());
        at = end + 1;
      }
    };
  };
  return program_main(
      argc, argv,
      {{"--maps", words(what.maps, size_from)},
       {"--sequences", words(what.sequences, positions_from)},
       words_flag("--passes", what.passes, {"forward", "both"}),
       rounds_flag(what.rounds)},
      [&](RankOfBench& rank) { return table(rank, what); },
      [](const Spec& spec) { return settings_of(spec) + ", one thread a rank"; });
}
