// Runs of the built `weft train` on a small text and a small model, for fixtures of tests.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "tools/weft_command.hpp"

namespace weft::test {

class TrainRuns : public ::testing::Test {
 protected:
  using Words = std::vector<std::string>;

  // A text with something to learn in it, and a model that learns it in moments.
  TrainRuns() {
    std::ofstream text(folder_ / "text");
    for (int i = 0; i < 400; ++i) text << "the quick brown fox " << i % 17 << " jumps over the lazy dog\n";
  }
  Words small(Words more) const {
    Words words{"train",      "--text",   (folder_ / "text").string(),
                "--dim",      "32",       "--layers",
                "2",          "--heads",  "4",
                "--kv-heads", "4",        "--ffn",
                "64",         "--seq",    "32",
                "--batch",    "4",        "--steps",
                "20",         "--warmup", "5",
                "--lr",       "0.01",     "--progress",
                "lines"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  // `environment`: NAME=value, set before the program starts.
  ChildProcess start(const Words& words, const Words& environment = {}, const std::string& name = "") {
    return start_weft(words, folder_ / ("out" + name), folder_ / ("err" + name), environment);
  }
  int run(const Words& words) {
    ChildProcess process = start(words);
    const auto status = process.wait(std::chrono::seconds(60));
    return status ? status->code : -2;
  }
  std::string out(const std::string& name = "") { return contents(folder_ / ("out" + name)); }
  std::string err(const std::string& name = "") { return contents(folder_ / ("err" + name)); }

  std::vector<double> losses(const std::string& file) {
    std::vector<double> found;
    std::ifstream in(folder_ / file);
    for (std::string line; std::getline(in, line);) {
      const auto j = nlohmann::json::parse(line);
      EXPECT_EQ(j.at("step").get<std::size_t>(), found.size());
      EXPECT_GT(j.at("tokens_per_s").get<double>(), 0);
      EXPECT_GT(j.at("grad_norm").get<double>(), 0);
      found.push_back(j.at("loss").get<double>());
    }
    return found;
  }
  std::string file(const std::string& name) { return (folder_ / name).string(); }

  TemporaryFolder folder_;
};

}  // namespace weft::test
