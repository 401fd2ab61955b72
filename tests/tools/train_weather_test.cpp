// weft train and weft parity with --model weather: its maps, its meshes, and what it refuses.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>
#include <string>
#include <vector>

#include "map_data.hpp"
#include "tools/train_runs.hpp"
#include "weft/base/error.hpp"

namespace weft::test::train_weather_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using tools::MapConfig;
using tools::MapData;

// A file of numpy.save.
template <class Number>
std::string array_file(const std::string& type, const std::string& shape, const std::vector<Number>& numbers,
                       const char* fortran = "False") {
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}", type, fortran, shape);
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  const auto length = static_cast<std::uint16_t>(header.size());
  std::string file = std::string("\x93NUMPY\x01") + '\0';
  file.append(reinterpret_cast<const char*>(&length), sizeof length);
  file += header;
  return file.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

class TrainWeatherTest : public TrainRuns {
 protected:
  std::string write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return file(name);
  }
  // A model that learns in moments.
  static Words weather(Words more) {
    Words words{
        "train", "--model",         "weather", "--channels", "8",    "--map-rows", "8",    "--map-columns",
        "16",    "--map-samples",   "60",      "--depth",    "1",    "--head-dim", "4",    "--local-window",
        "2",     "--global-window", "2",       "--mult",     "2",    "--batch",    "8",    "--steps",
        "16",    "--warmup",        "2",       "--lr",       "0.02", "--progress", "lines"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  // The output without the line breaks of its first lines.
  std::string unfolded() {
    std::string text = out();
    for (std::size_t at = 0; (at = text.find("\n  ", at)) != std::string::npos;) text.replace(at, 3, " ");
    return text;
  }
  std::vector<nlohmann::json> steps_of(const std::string& name) {
    std::vector<nlohmann::json> steps;
    std::ifstream in(folder_ / name);
    for (std::string line; std::getline(in, line);) steps.push_back(nlohmann::json::parse(line));
    return steps;
  }
  std::vector<double> losses_of(const std::string& name) {
    std::vector<double> losses;
    for (const nlohmann::json& step : steps_of(name)) losses.push_back(step.at("loss"));
    return losses;
  }
};

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-4 * expected[i]) << what << " step " << i;
}

// The coefficient of the wave with p periods over the rows and q over the columns.
std::complex<double> coefficient(const float* map, const MapConfig& c, std::int64_t p, std::int64_t q) {
  std::complex<double> sum = 0;
  for (std::int64_t i = 0; i < c.rows; ++i)
    for (std::int64_t j = 0; j < c.columns; ++j)
      sum += static_cast<double>(map[i * c.columns + j]) *
             std::polar(1.0, -2 * std::numbers::pi *
                                 (static_cast<double>(p * i) / static_cast<double>(c.rows) +
                                  static_cast<double>(q * j) / static_cast<double>(c.columns)));
  return sum / static_cast<double>(c.rows * c.columns);
}

// The target is the input half a row down and one and a quarter columns to the right: each wave of it is that
// of the input, turned by the phase of this way.
TEST_F(TrainWeatherTest, MadeUpMapsMoveWithOneVelocity) {
  MapConfig config{.channels = 3, .rows = 8, .columns = 16, .samples = 5};
  const MapData data(config, 0.4, 7);
  EXPECT_EQ(data.population(), 3);
  EXPECT_EQ(data.held_out(), 2);
  const std::size_t pixels = 8 * 16;
  std::vector<float> x(3 * pixels), y(3 * pixels), again(3 * pixels), other(3 * pixels);
  double power = 0;
  for (std::int64_t n = 0; n < 3; ++n) {
    data.read(n, x.data(), y.data());
    for (std::size_t c = 0; c < 3; ++c) {
      double squares = 0, explained = 0;
      for (std::size_t i = 0; i < pixels; ++i) squares += std::pow(x[c * pixels + i], 2) / pixels;
      for (std::int64_t p = 0; p <= 3; ++p)
        for (std::int64_t q = 1; q <= 3; ++q) {
          const std::complex<double> of_x = coefficient(x.data() + c * pixels, config, p, q),
                                     of_y = coefficient(y.data() + c * pixels, config, p, q);
          const double way =
              2 * std::numbers::pi * (0.5 * static_cast<double>(p) / 8 + 1.25 * static_cast<double>(q) / 16);
          EXPECT_LT(std::abs(of_y - of_x * std::polar(1.0, -way)), 1e-6) << n << " " << c;
          explained += 2 * std::norm(of_x);
        }
      EXPECT_NEAR(explained, squares, 1e-5 * squares) << "these waves are all";
      power += squares / 9;
    }
  }
  EXPECT_GT(power, 0.3);
  EXPECT_LT(power, 3);
  // A function of the seed and the number alone.
  MapData(config, 0, 7).read(2, again.data(), other.data());
  EXPECT_EQ(again, x);
  data.read(1, other.data(), y.data());
  EXPECT_NE(other, x);
  MapData(config, 0, 8).read(2, other.data(), y.data());
  EXPECT_NE(other, x);
  data.read_held_out(0, other.data(), y.data());
  MapData(config, 0, 7).read(3, again.data(), y.data());
  EXPECT_EQ(other, again);
}

TEST_F(TrainWeatherTest, MapsOfFiles) {
  std::vector<float> numbers(5 * 2 * 2 * 3);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i) / 4;
  const std::vector<double> wide(numbers.begin(), numbers.end());
  const std::string narrow = write("a.npy", array_file("<f4", "(5, 2, 2, 3)", numbers));
  for (const std::string& maps : {narrow, write("b.npy", array_file("<f8", "(5, 2, 2, 3)", wide))}) {
    MapConfig config{.maps = maps};
    config.fill_in();
    EXPECT_EQ(config.samples, 5);
    EXPECT_EQ(config.channels, 2);
    EXPECT_EQ(config.rows, 2);
    EXPECT_EQ(config.columns, 3);
    std::vector<float> x(12), y(12);
    const MapData data(config, 0, 1);  // the next map is the target
    EXPECT_EQ(data.population(), 4);
    EXPECT_EQ(data.held_out(), 0);
    data.read(1, x.data(), y.data());
    EXPECT_EQ(x, std::vector<float>(numbers.begin() + 12, numbers.begin() + 24));
    EXPECT_EQ(y, std::vector<float>(numbers.begin() + 24, numbers.begin() + 36));
    // No map is both in a sample for training and in one for evaluation.
    const MapData parts(config, 0.25, 1);
    EXPECT_EQ(parts.population(), 2);
    EXPECT_EQ(parts.held_out(), 1);
    parts.read_held_out(0, x.data(), y.data());
    EXPECT_EQ(x, std::vector<float>(numbers.begin() + 36, numbers.begin() + 48));
    config.targets = narrow;
    const MapData both(config, 0, 1);
    EXPECT_EQ(both.population(), 5);
    both.read(4, x.data(), y.data());
    EXPECT_EQ(x, std::vector<float>(numbers.begin() + 48, numbers.end()));
    EXPECT_EQ(y, x);
  }
  const auto says = [&](MapConfig config, double held_out, const std::string& text) {
    try {
      config.fill_in();
      MapData(config, held_out, 1);
      ADD_FAILURE() << "expected " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_argument);
      EXPECT_THAT(e.what(), HasSubstr(text));
    }
  };
  const auto file_says = [&](const std::string& bytes, const std::string& text) {
    says({.maps = write("x.npy", bytes)}, 0, text);
  };
  file_says("nothing of the kind", "train: maps \"" + file("x.npy") + "\": is no file of numpy.save");
  file_says(array_file("<f2", "(5, 2, 2, 3)", numbers), "has elements of type \"<f2\"; expected <f4 or <f8");
  file_says(array_file("<f4", "(5, 2, 2, 3)", numbers, "True"), "is in Fortran's order; expected C order");
  file_says(array_file("<f4", "(10, 2, 3)", numbers),
            "has the shape (10, 2, 3); expected (samples, channels, rows, columns)");
  file_says(array_file("<f4", "(5, 0, 2, 3)", numbers),
            "has the shape (5, 0, 2, 3); expected (samples, channels, rows, columns)");
  file_says(array_file("<f4", "(6, 2, 2, 3)", numbers), "says that it has 72 elements; there are 60");
  file_says(array_file("<f4", "(4000000000, 4000000000, 2, 3)", numbers),
            "has more elements than can be counted");
  says({.maps = narrow, .rows = 4}, 0,
       "map-rows is 4; maps \"" + narrow + "\" is (5, 2, 2, 3): expected 2, or 0");
  says({.maps = narrow, .targets = write("t.npy", array_file("<f4", "(4, 2, 2, 3)", numbers))}, 0,
       "is (4, 2, 2, 3); expected (5, 2, 2, 3), as maps");
  says({.targets = narrow}, 0, "targets is \"" + narrow + "\" without maps; expected both");
  says({.channels = -1}, 0, "channels is -1; expected 1 or more");
  says({.maps = write("1.npy", array_file("<f4", "(1, 2, 2, 3)", numbers))}, 0,
       "1 maps, each the target of the one before leave no sample to train on");
  says({.maps = narrow}, 0.1,
       "held-out is 0.1: 5 maps, each the target of the one before leave no sample to evaluate on");
}

// Activations in bf16: the losses of f32 up to rounding, also on two ranks that cut the maps.
TEST_F(TrainWeatherTest, MapsInBf16) {
  ASSERT_EQ(run(weather({"--metrics", file("f32")})), 0) << err();
  const Words narrow{"--weights", "bf16", "--activations", "bf16", "--metrics"};
  const auto with = [&](Words more, const std::string& name) {
    more.insert(more.begin(), narrow.begin(), narrow.end());
    more.insert(more.begin() + 5, file(name));
    return weather(more);
  };
  ASSERT_EQ(run(with({}, "one")), 0) << err();
  ASSERT_EQ(run(with({"--ranks", "2", "--domain", "2"}, "two")), 0) << err();
  const std::vector<double> one = losses_of("one"), two = losses_of("two"), wide = losses_of("f32");
  ASSERT_EQ(one.size(), wide.size());
  EXPECT_NE(one, wide);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(one[i], wide[i], 0.02 * wide[i]) << "step " << i;
    EXPECT_NEAR(two[i], one[i], 0.02 * one[i]) << "step " << i;
  }
  EXPECT_NEAR(two[0], one[0], 1e-6 * one[0]) << "the same pixels, before any update";
}

TEST_F(TrainWeatherTest, LearnsAndSaysHow) {
  ASSERT_EQ(run(weather({"--steps", "60", "--held-out", "0.2", "--eval-every", "30", "--metrics", file("m"),
                         "--csv", file("c"), "--curves", file("c.svg")})),
            0)
      << err();
  const auto steps = steps_of("m");
  ASSERT_EQ(steps.size(), 60u);
  EXPECT_LT(steps.back().at("loss").get<double>(), 0.7 * steps.front().at("loss").get<double>());
  EXPECT_GT(steps.back().at("maps_per_s").get<double>(), 0);
  EXPECT_FALSE(steps[0].contains("tokens_per_s"));
  EXPECT_EQ(steps[29].at("eval_elements").get<std::int64_t>(), 12 * 8 * 8 * 16);
  EXPECT_LT(steps[59].at("eval_loss").get<double>(), steps[29].at("eval_loss").get<double>());
  EXPECT_FALSE(steps[29].contains("eval_perplexity"));
  EXPECT_EQ(steps[5].at("epoch").get<int>(), 1) << "48 maps are 6 batches of 8";
  EXPECT_THAT(out(), HasSubstr(" parameters, 8 maps of 8 x 8 x 16 a step, mesh dp=1 x tp=1"));
  EXPECT_THAT(out(), HasSubstr("made-up maps\n"));
  EXPECT_THAT(out(), HasSubstr(" maps/s"));
  EXPECT_THAT(out(), HasSubstr(" squared error per element, "));
  EXPECT_THAT(out(), ::testing::ContainsRegex(
                         "held-out loss [0-9.]+ squared error per element, over 12288 elements"));
  EXPECT_THAT(out(), Not(HasSubstr("perplexity")));
  const std::string csv = contents(folder_ / "c");
  EXPECT_THAT(csv,
              ::testing::StartsWith("step,epoch,loss,grad_norm,lr,maps_per_s,seconds,memory_mib,peak_share,"
                                    "eval_loss,eval_elements\n"));
  for (std::size_t at = 0, end = 0; (end = csv.find('\n', at)) != std::string::npos; at = end + 1)
    EXPECT_EQ(std::count(csv.begin() + static_cast<std::ptrdiff_t>(at),
                         csv.begin() + static_cast<std::ptrdiff_t>(end), ','),
              10);
  EXPECT_THAT(contents(folder_ / "c.svg"), HasSubstr(">squared error per element</text>"));
}

// The same losses, held-out ones too, on every mesh: three held-out maps leave a data rank without one.
TEST_F(TrainWeatherTest, TheSameLossesOnEveryMesh) {
  const Words more{"--held-out", "0.05", "--dropout", "0.1"};
  const auto with = [&](Words mesh, const char* metrics) {
    mesh.insert(mesh.end(), more.begin(), more.end());
    mesh.insert(mesh.end(), {"--metrics", file(metrics)});
    return weather(mesh);
  };
  ASSERT_EQ(run(with({}, "one")), 0) << err();
  const std::vector<double> one = losses_of("one");
  const double held_out = steps_of("one").back().at("eval_loss");
  for (const Words& mesh : {Words{"--ranks", "4", "--domain", "4"}, Words{"--ranks", "4", "--domain", "2"},
                            Words{"--ranks", "4", "--domain", "2", "--tp", "2"}, Words{"--ranks", "4"},
                            Words{"--ranks", "4", "--domain", "2", "--data", "fsdp", "--ac", "full"},
                            Words{"--ranks", "4", "--data", "hsdp", "--ac", "selective"}}) {
    ASSERT_EQ(run(with(mesh, "m")), 0) << err();
    const std::string what = fmt::format("{}", fmt::join(mesh, " "));
    expect_near(losses_of("m"), one, what.c_str());
    EXPECT_NEAR(steps_of("m").back().at("eval_loss").get<double>(), held_out, 1e-4 * held_out) << what;
  }
  EXPECT_THAT(unfolded(), HasSubstr("mesh dp_replicate=2 x dp_shard=2 x tp=1"));
  ASSERT_EQ(run(weather({"--metrics", file("one")})), 0);
  ASSERT_EQ(run(weather({"--ranks", "2", "--domain", "2", "--micro-batches", "3", "--metrics", file("m")})),
            0)
      << err();
  EXPECT_THAT(unfolded(), HasSubstr("mesh dp=1 x tp=1 x domain=2"));
  expect_near(losses_of("m"), losses_of("one"), "micro-batches");
}

TEST_F(TrainWeatherTest, ResumesOnAnotherMesh) {
  const Words more{"--ema", "0.9", "--held-out", "0.1", "--eval-every", "4"};
  const auto with = [&](Words mesh) {
    mesh.insert(mesh.end(), more.begin(), more.end());
    return weather(mesh);
  };
  ASSERT_EQ(run(with({"--metrics", file("one")})), 0) << err();
  ASSERT_EQ(run(with({"--ranks", "2", "--domain", "2", "--save", file("run"), "--until", "7", "--metrics",
                      file("m")})),
            0)
      << err();
  ASSERT_EQ(
      run(with({"--ranks", "4", "--tp", "2", "--save", file("run"), "--resume", "--metrics", file("m")})), 0)
      << err();
  EXPECT_THAT(out(), HasSubstr("resumed at step 7"));
  expect_near(losses_of("m"), losses_of("one"), "resumed");
  // The configuration beside the run is the run.
  const std::string beside = contents(folder_ / "run/config.toml");
  EXPECT_THAT(beside, HasSubstr("\nkind = 'weather'\n"));
  EXPECT_THAT(beside, HasSubstr("\n[model]\ninit_std = 0.02\n"));
  ASSERT_EQ(run({"train", "--config", file("run/config.toml"), "--ranks", "1", "--tp", "1", "--resume",
                 "--print-config"}),
            0);
  EXPECT_THAT(out(), HasSubstr("\nchannels = 8\n"));
  const auto refused = [&](Words words, const std::string& text) {
    words.insert(words.begin(), {"--ema", "0.9", "--held-out", "0.1", "--save", file("run"), "--resume"});
    EXPECT_EQ(run(weather(words)), 2);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  refused({"--mult", "3"}, "--mult is 2 there and 3 here");
  refused({"--map-samples", "61"}, "--map-samples is 60 there and 61 here");
  refused({"--held-out", "0.2"}, "--held-out is 0.1 there and 0.2 here");
  EXPECT_NE(run({"sample", file("run")}), 0);
}

// An elastic run on fewer ranks than its mesh needs takes a smaller domain axis, and what is left is spare.
TEST_F(TrainWeatherTest, AnElasticRunTakesADomainAxisThatFits) {
  const auto elastic = [&](const char* ranks, const char* save) {
    return run(weather({"--ranks", ranks, "--elastic", "1:3", "--domain", "2", "--save", file(save),
                        "--save-every", "4", "--until", "4"}));
  };
  ASSERT_EQ(elastic("3", "three"), 0) << err();
  EXPECT_THAT(unfolded(), HasSubstr("mesh dp=1 x tp=1 x domain=2"));
  EXPECT_THAT(out(), HasSubstr("1 of 3 ranks are spare"));
  ASSERT_EQ(elastic("1", "one"), 0) << err();
  EXPECT_THAT(unfolded(), HasSubstr("mesh dp=1 x tp=1,"));
}

TEST_F(TrainWeatherTest, LearnsMapsOfAFile) {
  std::vector<float> numbers(12 * 4 * 4 * 4);
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] =
        static_cast<float>(std::sin(static_cast<double>(i / 64) + 0.3 * static_cast<double>(i % 64)));
  write("a.npy", array_file("<f4", "(12, 4, 4, 4)", numbers));
  const std::string table =
      "steps = 12\nbatch = 4\nwarmup = 2\nlr = 0.02\nprogress = 'none'\nmetrics = '" + file("m") +
      "'\n[model]\nkind = 'weather'\ndepth = 1\nhead_dim = 4\nlocal_window = 2\nglobal_window = 2\nmult = 2\n"
      "init_std = 0.03\n[data]\nmaps = '" +
      file("a.npy") + "'\n[parallelism]\nranks = 2\ndomain = 2\n[checkpoint]\nfolder = '" + file("run") +
      "'\n";
  ASSERT_EQ(run({"train", "--config", write("run.toml", table)}), 0) << err();
  EXPECT_THAT(unfolded(), HasSubstr("4 maps of 4 x 4 x 4 a step, mesh dp=1 x tp=1 x domain=2"));
  EXPECT_THAT(unfolded(), HasSubstr("maps " + file("a.npy")));
  const std::vector<double> by_two = losses_of("m");
  EXPECT_LT(by_two.back(), by_two.front());
  ASSERT_EQ(run({"train", "--config", file("run.toml"), "--ranks", "1", "--domain", "1", "--overwrite"}), 0)
      << err();
  expect_near(losses_of("m"), by_two, "one rank");
  numbers[0] += 1;
  write("a.npy", array_file("<f4", "(12, 4, 4, 4)", numbers));
  EXPECT_EQ(run({"train", "--config", file("run.toml"), "--resume"}), 2);
  EXPECT_THAT(err(), HasSubstr("is of another run: --maps has other bytes"));
}

TEST_F(TrainWeatherTest, WhatAKindDoesNotHaveIsRefusedByName) {
  const auto refused = [&](const Words& more, const std::string& text) {
    EXPECT_EQ(run(weather(more)), 2) << text;
    EXPECT_THAT(err(), HasSubstr("train: " + text));
  };
  const auto no_option = [&](const std::string& flag, const std::string& value, const std::string& usual,
                             bool quoted = false) {
    const char* const q = quoted ? "\"" : "";
    refused({"--" + flag, value},
            fmt::format("{0} is {3}{1}{3} with --model weather, a model of maps that has no such option; "
                        "expected {3}{2}{3}",
                        flag, value, usual, q));
  };
  no_option("seq", "64", "128");
  no_option("dim", "32", "128");
  no_option("layers", "2", "4");
  no_option("heads", "2", "4");
  no_option("kv-heads", "2", "0");
  no_option("ffn", "64", "0");
  no_option("max-seq", "64", "0");
  no_option("vocab-size", "300", "0");
  no_option("label-smoothing", "0.1", "0");
  no_option("z-loss", "0.1", "0");
  no_option("loss-chunk", "8", "0");
  no_option("experts", "8", "0");
  no_option("top-k", "1", "2");
  no_option("vocab", "shard", "whole", true);
  no_option("float8", "rowwise", "none", true);
  no_option("format", "npy", "auto", true);
  no_option("draw", "sequences", "offsets", true);
  no_option("document-end", "x", "", true);
  no_option("tokenizer", "t.json", "", true);
  no_option("held-out-file", "h", "", true);
  no_option("text", file("text"), "/usr/share/common-licenses/GPL-3", true);
  refused({"--sequence-parallel"}, "sequence-parallel is true with --model weather");
  refused({"--pp", "2", "--ranks", "2"},
          "pp is 2 with --model weather; expected 1: the stage is no pipeline");
  refused({"--ep", "2", "--ranks", "2"}, "ep is 2; expected 1, since the model has no experts");
  refused(
      {"--exact", "--tp", "2", "--ranks", "2"},
      "exact with --model weather over tp=2; expected tp 1: the gradient of a position bias is a sum over "
      "all heads, which has no rule for exact mode");
  const auto inexact = [&](const Words& more, const std::string& text) {
    Words words = weather(more);
    words.push_back("--exact");
    EXPECT_EQ(run(words), 2) << text;
    EXPECT_THAT(err(), HasSubstr("exact: " + text));
  };
  inexact({"--ranks", "3", "--batch", "9"}, "batch: maps: 3 ranks do not divide 8 blocks");
  inexact({"--ranks", "4", "--batch", "6"},
          "batch: maps: 6 over 4 ranks (6 = 4 x 1 + 2); expected equal parts");
  inexact({"--ranks", "4", "--domain", "4", "--map-rows", "6"},
          "map-rows: rows of a map: 6 over 4 ranks (6 = 4 x 1 + 2)");
  inexact({"--ranks", "8", "--domain", "8"},
          "local-window: rows of windows of 2: 4 over 8 ranks (4 = 8 x 0 + 4)");
  inexact({"--ranks", "4", "--domain", "4", "--global-window", "4"},
          "global-window: rows of windows of 4: 2 over 4 ranks (2 = 4 x 0 + 2)");
  inexact({"--ranks", "2", "--held-out", "0.05"},
          "held-out: maps of the last batch: 3 over 2 ranks (3 = 2 x 1 + 1)");
  refused({"--local-window", "3"}, "8 rows do not divide into windows of local-window=3 (8 = 3 x 2 + 2)");
  refused({"--global-window", "16"},
          "8 rows do not divide into windows of global-window=16 (8 = 16 x 0 + 8)");
  refused({"--ranks", "3", "--tp", "3"}, "2 heads do not divide into tp=3 (2 = 3 x 0 + 2)");
  refused({"--ranks", "16", "--domain", "16"}, "domain is 16; expected at most 8, the rows of a map");
  refused({"--domain", "0"}, "domain is 0; expected 1 or more");
  refused({"--held-out", "1"}, "held-out is 1; expected 0 (nothing) or more, and less than 1");
  refused({"--batch", "1", "--ranks", "2"}, "batch is 1; expected at least one map for each of dp=2");
  EXPECT_EQ(run(weather({"--head-dim", "9"})), 2);
  EXPECT_THAT(err(), HasSubstr("weather stage: head_dim is 9; expected at most dim 8"));
  EXPECT_EQ(run(weather({"--depth", "0"})), 2);
  EXPECT_THAT(err(), HasSubstr("weather stage: depth is 0; expected at least 1"));

  const auto tokens = [&](const Words& more, const std::string& text) {
    EXPECT_EQ(run(small(more)), 2) << text;
    EXPECT_THAT(err(), HasSubstr("train: " + text));
  };
  tokens(
      {"--domain", "2"},
      "domain is 2 with --model dense; expected 1: a sequence of tokens is no map, and has no rows to cut; "
      "--sequence-parallel cuts sequences");
  for (const auto& [flag, usual] : {std::pair{"depth", "2"},
                                    {"channels", "0"},
                                    {"map-rows", "0"},
                                    {"map-columns", "0"},
                                    {"map-samples", "0"},
                                    {"head-dim", "8"},
                                    {"local-window", "4"},
                                    {"global-window", "4"},
                                    {"mult", "4"},
                                    {"dropout", "0"},
                                    {"attention-dropout", "0"}})
    tokens({std::string("--") + flag, "1"},
           fmt::format("{} is 1 with --model dense, a model of tokens that has no such option; expected {}",
                       flag, usual));
  for (const char* flag : {"maps", "targets"})
    tokens({std::string("--") + flag, "a.npy", "--experts", "2"},
           fmt::format(
               "{} is \"a.npy\" with --model moe, a model of tokens that has no such option; expected \"\"",
               flag));
}

TEST_F(TrainWeatherTest, ParityComparesDomainMeshes) {
  Words words = weather({"--held-out", "0.1", "--resume", "--compare", "6", "--json", file("p")});
  words[0] = "parity";
  words.erase(std::find(words.begin(), words.end(), "--progress"),
              std::find(words.begin(), words.end(), "--progress") + 2);
  ASSERT_EQ(run(words), 0) << err() << out();
  EXPECT_THAT(out(), HasSubstr("Loss in squared error per element, "));
  const auto j = nlohmann::json::parse(contents(folder_ / "p"));
  EXPECT_TRUE(j.at("passed").get<bool>());
  for (const char* mesh : {"1x1", "2x1", "1x2", "d2", "d4", "2x1xd2", "2x1>2x1xd2"})
    EXPECT_EQ(j.at("loss").at(mesh).size(), 6u) << mesh;
  // Errors come before the first run, and name the mesh.
  const auto refused = [&](Words more, const std::string& text) {
    more.insert(more.begin(), words.begin(), words.end());
    EXPECT_EQ(run(more), 2);
    EXPECT_THAT(err(), HasSubstr(text));
  };
  refused({"--meshes", "1x1,fsdp:3x1xd16"},
          "parity: on fsdp:3x1xd16: domain is 16; expected at most 8, the rows of a map");
  for (const char* wrong : {"2xd", "xd2", "2x1xd0", "2xd2", "d2x1"})
    refused(
        {"--meshes", std::string("1x1,") + wrong},
        fmt::format(
            "mesh \"{}\" is not dp x tp; expected such as \"2x1\", or \"fsdp:2x1\", or of maps \"2x1xd2\"",
            wrong));
  refused({"--model", "dense", "--meshes", "1x1,d2"},
          "with --model dense, a model of tokens that has no such option");
}

// All bits of all steps on the meshes that share maps, samples and parameters, and of a run that goes on on
// another mesh.
TEST_F(TrainWeatherTest, ExactParity) {
  Words words = weather({"--exact", "--resume", "--dropout", "0.1", "--compare", "4", "--json", file("p")});
  words[0] = "parity";
  words.erase(std::find(words.begin(), words.end(), "--progress"),
              std::find(words.begin(), words.end(), "--progress") + 2);
  ASSERT_EQ(run(words), 0) << out() << err();
  std::string text = out();
  std::replace(text.begin(), text.end(), '\n', ' ');
  EXPECT_THAT(text,
              HasSubstr("EXACT: 1x1, 2x1, d2, d4, 2x1xd2, fsdp:2x1xd2, 2x1>fsdp:2x1xd2 have the same bits"));
  const auto j = nlohmann::json::parse(contents(folder_ / "p"));
  EXPECT_TRUE(j.at("passed").get<bool>());
  EXPECT_EQ(j.at("loss").at("1x1"), j.at("loss").at("d4"));
}

}  // namespace
}  // namespace weft::test::train_weather_test
