// Rows of tokens on their way to experts, next to a bare all_to_all_v of the same bytes; and a layer of
// experts next to a dense layer of as many products.
//
//   experts_bench --dispatch 128x7168,2048x1024 --layers 512 --ranks 2
//
// A dispatch is given as tokens of each rank x width, in bf16: each token chooses 2 of 8 experts at random.
// For each case:
//   median_us     start_dispatch() and finish(), of tokens in shared memory
//   bare_us       all_to_all_v of as many bytes as a rank has afterwards: a row for each choice, own rows too,
//                 packed in order, from and to shared memory
//   over          median_us / bare_us
//   combine_us    start_combine() and finish(), of results in shared memory; combine_over: of bare_us
//   travel_us     all_to_all_v of the rows that travel between ranks alone, each token once to a rank
//   local_us      start_dispatch() and finish(), of tokens in ordinary memory
// A layer is given as tokens of each rank: dim 512, 8 SwiGLU experts of 512 hidden features, 2 for each
// token.
//   median_us   forward and backward of the layer over all ranks
//   dense_us    the same of a SwiGLU of 1024 hidden features, on each rank by itself
//   over        median_us / dense_us
// The program compares rows and outputs with those of one rank, bit for bit. One thread per rank.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>

#include "choices.hpp"
#include "inputs.hpp"
#include "program.hpp"
#include "turns.hpp"
#include "weft/base/error.hpp"
#include "weft/ep/dispatch.hpp"
#include "weft/ep/moe.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/init.hpp"

namespace weft::bench {
namespace {

struct RowsSize {
  std::int64_t tokens, width;
};
struct What {
  std::vector<std::string> dispatch = {"128x7168", "2048x1024"};
  std::vector<std::string> layers = {"512"};
  int rounds = 1;
};

RowsSize rows_from(const std::string& text) {
  RowsSize s{};
  char rest = 0;
  if (std::sscanf(text.c_str(), "%ldx%ld%c", &s.tokens, &s.width, &rest) != 2 || s.tokens < 1 || s.width < 1)
    throw Error(ErrorCode::bad_argument,
                "--dispatch " + text + ": expected tokens of each rank x width: 128x7168");
  return s;
}
std::int64_t tokens_from(const std::string& text) {
  char rest = 0;
  std::int64_t n = 0;
  if (std::sscanf(text.c_str(), "%ld%c", &n, &rest) != 1 || n < 1)
    throw Error(ErrorCode::bad_argument, "--layers " + text + ": expected tokens of each rank: 512");
  return n;
}

// Everything of a dispatch that is made once for a layer and used in forward and backward.
struct Rows {
  Rows(RankOfBench& rank, const RowsSize& s)
      : compute(rank.context, 1), group(rank.group), size(s), first(group.rank() * s.tokens) {
    const Tensor experts(rank.context, {s.tokens, kTopK}, DType::i32),
        weights(rank.context, {s.tokens, kTopK});
    for (std::int64_t t = 0; t < s.tokens; ++t)
      for (int k = 0; k < kTopK; ++k)
        experts.as<std::int32_t>()[static_cast<std::size_t>(t * kTopK + k)] = choice_of(first + t, k);
    std::vector<std::int64_t> parts;
    for (int r = 0; r < group.size(); ++r) parts.push_back(chunk_of(kExperts, group.size(), r).offset);
    parts.push_back(kExperts);
    const ExpertChoices choices = gather_choices(compute, group, experts, weights);
    routes = std::make_unique<TokenRoutes>(choices, group.rank(), kTopK, parts);
    x = compute.make({s.tokens, s.width}, DType::bf16, Memory::shared);
    for (std::int64_t i = 0; i < x.count(); ++i)
      x.as<bf16>()[static_cast<std::size_t>(i)] = bf16(number(kX, first * s.width + i));
    local_x = compute.make({s.tokens, s.width}, DType::bf16);
    std::memcpy(local_x.data(), x.data(), static_cast<std::size_t>(x.bytes()));
    results_of = compute.make({routes->rows(), s.width}, DType::bf16, Memory::shared);
    for (const bool each_choice : {false, true}) {
      ChoiceCounts counts = counts_of_choices(s.tokens, group.rank(), group.size(), each_choice);
      for (auto* list : {&counts.sent, &counts.came})
        for (std::int64_t& count : *list) count *= s.width;
      const auto zeros = [&](const std::vector<std::int64_t>& of) {
        return compute.zeros({std::accumulate(of.begin(), of.end(), std::int64_t{0})}, DType::bf16,
                             Memory::shared);
      };
      bare.push_back({zeros(counts.sent), zeros(counts.came), counts.sent, counts.came});
    }
  }
  // Results are given back first: the bare call has its buffers, too.
  void dispatch(const Tensor& from) {
    rows = {};
    rows = routes->start_dispatch(compute, &group, from).finish();
  }
  void combine() {
    results = {};
    results = routes->start_combine(compute, &group, results_of).finish();
  }
  void bare_call(std::size_t which) {
    const Bare& b = bare[which];
    group.all_to_all_v(b.in.view(), b.out.view(), {b.in_counts}, {b.out_counts}).wait();
  }
  // Row by row, what one rank would have.
  std::string verify() const {
    std::int64_t row = 0;
    const std::int64_t all = size.tokens * group.size();
    const Chunk mine = chunk_of(kExperts, group.size(), group.rank());
    for (std::int64_t e = mine.offset; e < mine.offset + mine.size; ++e)
      for (std::int64_t t = 0; t < all; ++t)
        for (int k = 0; k < kTopK; ++k) {
          if (choice_of(t, k) != e) continue;
          for (const std::int64_t c : {std::int64_t{0}, size.width - 1})
            if (rows.as<bf16>()[static_cast<std::size_t>(row * size.width + c)].bits !=
                bf16(number(kX, t * size.width + c)).bits)
              return "row " + std::to_string(row) + " is not that of token " + std::to_string(t);
          ++row;
        }
    return row == rows.size(0) ? "" : "there are rows too many";
  }
  Compute compute;
  ProcessGroup& group;
  RowsSize size;
  std::int64_t first;
  std::unique_ptr<TokenRoutes> routes;
  Tensor x, local_x, rows, results_of, results;
  struct Bare {
    Tensor in, out;
    std::vector<std::int64_t> in_counts, out_counts;
  };
  std::vector<Bare> bare;  // each token once to each other rank; each choice, also those of this rank
};

std::string fine() { return {}; }

Numbers measured_rows(RankOfBench& rank, const RowsSize& s, const Agree& agree, double seconds) {
  const auto all = std::make_shared<Rows>(rank, s);
  all->dispatch(all->x);
  const auto verify = [all] { return all->verify(); };
  const TimedTurns turns({{[all] { all->dispatch(all->x); }, verify},
                          {[all] { all->bare_call(1); }, fine},
                          {[all] { all->combine(); }, fine},
                          {[all] { all->bare_call(0); }, fine},
                          {[all] { all->dispatch(all->local_x); }, verify}},
                         agree, seconds);
  const auto& us = turns.us;
  return {{"median_us", median(us[0])},
          {"p99_us", turns.p99_us},
          {"bare_us", median(us[1])},
          {"combine_us", median(us[2])},
          {"travel_us", median(us[3])},
          {"local_us", median(us[4])},
          {"over", turns.over_turns([&](std::size_t i) { return us[0][i] / us[1][i]; })},
          {"combine_over", turns.over_turns([&](std::size_t i) { return us[2][i] / us[1][i]; })},
          {"sent_bytes", static_cast<double>(all->routes->sent_rows() * s.width * 2)},
          {"row_bytes", static_cast<double>(all->routes->rows() * s.width * 2)},
          {"samples", static_cast<double>(turns.samples)}};
}

struct Layer {
  Layer(Compute& compute_in, std::unique_ptr<Module> module_in)
      : compute(compute_in), module(std::move(module_in)) {}
  void run() {
    for (Parameter* p : module->parameters()) p->zero_gradient();
    Frame frame(compute, {.seed = 1, .step = 0});
    y = module->forward(x, frame)[0];
    dx = module->backward(dy, frame)[0];
  }
  Compute& compute;
  std::unique_ptr<Module> module;
  Tensor x, dy, y, dx;
};

Numbers measured_layer(RankOfBench& rank, const DeviceMesh& mesh, std::int64_t tokens, const Agree& agree,
                       double seconds) {
  constexpr std::int64_t kDim = 512;
  MoEConfig config;
  config.dim = config.hidden = kDim;
  config.experts = kExperts;
  config.router.top_k = kTopK;
  const auto compute = std::make_shared<Compute>(rank.context, 1);
  const auto layer = std::make_shared<Layer>(*compute, std::make_unique<MoE>(config)),
             serial = std::make_shared<Layer>(*compute, std::make_unique<MoE>(config)),
             dense = std::make_shared<Layer>(*compute, std::make_unique<SwiGLU>(kDim, kTopK * kDim));
  apply_expert_parallel(*layer->module, mesh, {.uneven = true});
  replicate(*layer->module, mesh);
  for (Layer* l : {&*layer, &*serial, &*dense}) {
    materialise(*l->module, *compute);
    initialise(*l->module, 1);
  }
  const Shape whole{tokens * mesh.size(), 1, kDim};
  serial->x = numbers(rank.context, whole, kX, 2.0f), serial->dy = numbers(rank.context, whole, kDy, 2.0f);
  const LayoutRef cut = make_layout(mesh, {{"ep", Shard{0}}}, whole);
  layer->x = distribute(serial->x, cut), layer->dy = distribute(serial->dy, cut);
  dense->x = layer->x.with_layout(nullptr), dense->dy = layer->dy.with_layout(nullptr);
  serial->run();
  const auto verify = [layer, serial]() -> std::string {
    for (const auto& [what, got, expected] :
         {std::tuple{"y", &layer->y, &serial->y}, {"dx", &layer->dx, &serial->dx}}) {
      const Tensor part = distribute(*expected, got->layout());
      if (std::memcmp(got->data(), part.data(), static_cast<std::size_t>(part.bytes())) != 0)
        return std::string(what) + " has other bits than on one rank";
    }
    return "";
  };
  const TimedTurns turns({{[layer] { layer->run(); }, verify}, {[dense] { dense->run(); }, fine}}, agree,
                         seconds);
  const auto& us = turns.us;
  return {{"median_us", median(us[0])},
          {"p99_us", turns.p99_us},
          {"dense_us", median(us[1])},
          {"over", turns.over_turns([&](std::size_t i) { return us[0][i] / us[1][i]; })},
          {"samples", static_cast<double>(turns.samples)}};
}

std::vector<TableRow> table(RankOfBench& rank, const What& what) {
  const auto mesh = std::make_shared<const DeviceMesh>(rank.group, MeshShape{{"ep", -1}});
  std::vector<TableRow> rows;
  const auto add = [&](const std::string& name, auto measured) {
    TableRow row;
    row.name = name;
    row.row = {{{"op", "experts"}, {"case", name}}, rank.spec.ranks, 0, {}};
    row.measure = measured;
    rows.push_back(std::move(row));
  };
  for (int round = 0; round < what.rounds; ++round) {
    for (const std::string& size : what.dispatch)
      add("dispatch/" + size, [&rank, s = rows_from(size)](const Agree& agree, double seconds) {
        return measured_rows(rank, s, agree, seconds);
      });
    for (const std::string& tokens : what.layers)
      add("layer/" + tokens, [&rank, mesh, n = tokens_from(tokens)](const Agree& agree, double seconds) {
        return measured_layer(rank, *mesh, n, agree, seconds);
      });
  }
  return rows;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  What what;
  const auto list = [](std::vector<std::string>& to, auto check) {
    return [&to, check](const std::string& text) {
      to = text.empty() ? std::vector<std::string>() : words(text);
      for (const std::string& word : to) check(word);
    };
  };
  return program_main(
      argc, argv,
      {{"--dispatch", list(what.dispatch, rows_from)},
       {"--layers", list(what.layers, tokens_from)},
       rounds_flag(what.rounds)},
      [&](RankOfBench& rank) { return table(rank, what); },
      [](const Spec& spec) { return settings_of(spec) + ", one thread a rank"; });
}
