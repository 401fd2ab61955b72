// The transformer stage of weather models, on maps.
#include <fmt/format.h>

#include <algorithm>

#include "model_kind.hpp"
#include "train_flags.hpp"
#include "trainer.hpp"
#include "weft/nn/exact.hpp"

namespace weft::tools {
namespace {

class MapSamples final : public Samples {
 public:
  MapSamples(const TrainConfig& config, Context& context)
      : maps_(config.maps), context_(&context), data_(config.maps, config.source.held_out, config.seed) {}
  std::int64_t population() const override { return data_.population(); }
  std::int64_t held_out() const override { return data_.held_out(); }
  // Micro-batches: parts of this rank's maps, the first ones larger.
  BatchRows training(std::span<const std::int64_t> numbers, const BatchCut& cut) const override {
    std::vector<Batch> batches;
    const auto all = static_cast<std::int64_t>(numbers.size());
    for (std::int64_t m = 0, first = 0; m < cut.micro_batches; ++m) {
      const std::int64_t count = all / cut.micro_batches + (m < all % cut.micro_batches ? 1 : 0);
      Batch batch = empty_batch(count);
      for (std::int64_t i = 0; i < count; ++i)
        data_.read(numbers[static_cast<std::size_t>(first + i)], place_of(batch.inputs[0], i),
                   place_of(batch.targets[0], i));
      batch.global_rows = cut.micro_batches == 1 ? cut.global_rows : count * cut.data_ranks;
      batches.push_back(std::move(batch));
      first += count;
    }
    return {.batches = std::move(batches), .sequences = {}};
  }
  // The last batch has the maps that are left, and ranks may have none of them.
  std::optional<BatchRows> held_out(std::int64_t first, const BatchCut& cut,
                                    const PartOf& part_of) const override {
    const std::int64_t global = std::min(cut.global_rows, data_.held_out() - first);
    const Chunk part = part_of(global);
    Batch batch = empty_batch(part.size);
    batch.global_rows = global;
    for (std::int64_t i = 0; i < part.size; ++i)
      data_.read_held_out(first + part.offset + i, place_of(batch.inputs[0], i),
                          place_of(batch.targets[0], i));
    std::vector<Batch> batches;
    batches.push_back(std::move(batch));
    return BatchRows{.batches = std::move(batches), .sequences = {}};
  }

 private:
  Batch empty_batch(std::int64_t rows) const {
    const Shape shape{rows, maps_.channels, maps_.rows, maps_.columns};
    return {.inputs = {Tensor(*context_, shape)}, .targets = {Tensor(*context_, shape)}};
  }
  float* place_of(const Tensor& maps, std::int64_t row) const {
    return maps.data_ptr<float>() + row * maps_.channels * maps_.rows * maps_.columns;
  }
  MapConfig maps_;
  Context* context_;
  MapData data_;
};

class WeatherKind final : public ModelKind {
 public:
  KindWords words(const TrainConfig& c) const override {
    return {.a_step = fmt::format("{} maps of {} x {} x {}", c.global_batch, c.maps.channels, c.maps.rows,
                                  c.maps.columns),
            .source = c.maps.maps.empty() ? "made-up maps" : "maps " + c.maps.maps.string(),
            .rate = "maps",
            .rate_brief = "maps",
            .counted = "elements",
            .one = "element",
            .loss = "squared error per element",
            .perplexity = false};
  }
  void fill_in(TrainConfig& c) const override { c.maps.fill_in(); }
  void check_flags(const TrainConfig& c) const override {
    expect_flags_of_kind(c);
    const auto refuse = [&](const char* flag, const std::string& value, const std::string& expected) {
      bad_training(fmt::format("{} is {} with --model weather; expected {}", flag, value, expected));
    };
    if (c.pp > 1) refuse("pp", std::to_string(c.pp), "1: the stage is no pipeline");
    if (c.exact && c.tp > 1)
      bad_training(fmt::format(
          "exact with --model weather over tp={}; expected tp 1: the gradient of a position bias is "
          "a sum over all heads, which has no rule for exact mode",
          c.tp));
  }
  void check_sizes(const TrainConfig& c, const MeshShape& mesh) const override {
    if (!(c.source.held_out >= 0 && c.source.held_out < 1))
      bad_training(
          fmt::format("held-out is {}; expected 0 (nothing) or more, and less than 1", c.source.held_out));
    c.maps.check();
    const WeatherStageConfig stage = c.weather_model();
    stage.check();
    for (const auto& [flag, window] :
         {std::pair{"local-window", stage.local_window}, {"global-window", stage.global_window}})
      for (const auto& [what, size] : {std::pair{"rows", c.maps.rows}, {"columns", c.maps.columns}})
        if (size % window != 0)
          bad_training(fmt::format("{} {} do not divide into windows of {}={} ({} = {} x {} + {})", size,
                                   what, flag, window, size, window, size / window, size % window));
    for (const auto& [what, size] :
         {std::pair{"heads", stage.heads()}, {"hidden features", stage.mult * stage.dim}})
      if (size % c.tp != 0)
        bad_training(fmt::format("{} {} do not divide into tp={} ({} = {} x {} + {})", size, what, c.tp, size,
                                 c.tp, size / c.tp, size % c.tp));
    if (c.domain > c.maps.rows)
      bad_training(
          fmt::format("domain is {}; expected at most {}, the rows of a map", c.domain, c.maps.rows));
    if (!c.exact) return;
    expect_exact_parts("batch: maps", c.global_batch, data_ranks_of(mesh));
    expect_exact_parts("map-rows: rows of a map", c.maps.rows, c.domain);
    for (const auto& [flag, window] :
         {std::pair{"local-window", stage.local_window}, {"global-window", stage.global_window}})
      expect_exact_parts(fmt::format("{}: rows of windows of {}", flag, window), c.maps.rows / window,
                         c.domain);
    if (c.source.held_out > 0)  // the last batch of held-out maps
      expect_exact_parts("held-out: maps of the last batch",
                         MapData(c.maps, c.source.held_out, c.seed).held_out() % c.global_batch,
                         data_ranks_of(mesh));
  }
  Recipe recipe(const TrainConfig& c) const override { return weather_recipe(c.weather_model()); }
  std::unique_ptr<Samples> samples(const TrainConfig& c, Context& context) const override {
    return std::make_unique<MapSamples>(c, context);
  }
  std::string identity(const TrainConfig& c) const override {
    const WeatherStageConfig s = c.weather_model();
    std::string identity = fmt::format(
        "model=weather channels={} depth={} head_dim={} local_window={} global_window={} mult={} dropout={} "
        "attention_dropout={} {}",
        s.dim, s.depth, s.head_dim, s.local_window, s.global_window, s.mult, s.dropout, s.attention_dropout,
        c.maps.identity());
    if (s.init_std != WeatherStageConfig().init_std) identity += fmt::format(" init_std={}", s.init_std);
    if (c.source.held_out > 0) identity += fmt::format(" held_out={}", c.source.held_out);
    return identity;
  }
  std::string table(const TrainConfig& c) const override {
    return fmt::format("[model]\ninit_std = {}\n", c.model.init_std);
  }
  std::string sample_text(const TrainConfig&) const override { return ""; }
  std::int64_t units_per_step(const TrainConfig& c) const override { return c.global_batch; }
  // 6 for each pixel and weight by which it is multiplied, and for each attention 12 for each feature and
  // each pixel of a window. A position bias is computed once for all maps.
  double flops_per_unit(const TrainConfig& c, std::span<const Parameter* const> parameters) const override {
    double weights = 0;
    for (const Parameter* p : parameters)
      if (p->path().find(".dpb.") == std::string::npos)
        weights += static_cast<double>(p->global_shape().count());
    const WeatherStageConfig s = c.weather_model();
    const double pixels = static_cast<double>(c.maps.rows * c.maps.columns);
    const std::int64_t seen = s.local_window * s.local_window + s.global_window * s.global_window;
    return pixels * (6 * weights + 12 * static_cast<double>(s.depth * s.heads() * s.head_dim * seen));
  }
};

}  // namespace

WeatherStageConfig TrainConfig::weather_model() const {
  WeatherStageConfig stage = weather;
  stage.dim = maps.channels;
  stage.init_std = model.init_std;
  return stage;
}

const ModelKind& weather_kind() {
  static const WeatherKind kind;
  return kind;
}

}  // namespace weft::tools
