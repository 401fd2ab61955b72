// Every target over its seeds, over what fuzzing has found (tests/fuzz/corpus), and over both with a byte
// changed, cut or doubled: what libFuzzer does, without it, the same on every run.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "store/tcp/seal.hpp"
#include "targets.hpp"
#include "weft/base/error.hpp"

namespace weft::fuzz::corpus_test {
namespace {

std::vector<std::string> inputs(const Target& target) {
  std::vector<std::string> all = target.seeds();
  const std::filesystem::path folder = std::filesystem::path(WEFT_FUZZ_CORPUS) / target.name;
  std::vector<std::filesystem::path> files;
  std::error_code absent;
  for (const auto& entry : std::filesystem::directory_iterator(folder, absent)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    std::ifstream in(path, std::ios::binary);
    all.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return all;
}

class Corpus : public ::testing::TestWithParam<Target> {
 protected:
  void SetUp() override {
    try {
      key_of_secret("0123456789abcdef");
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
};

TEST_P(Corpus, IsRead) {
  const auto all = inputs(GetParam());
  EXPECT_GE(all.size(), 3u);
  for (const std::string& input : all) GetParam().run(input);
}

TEST_P(Corpus, AndWhatIsNearIt) {
  std::uint64_t state = 1;
  const auto random = [&](std::size_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>(state >> 33) % below;
  };
  for (const std::string& input : inputs(GetParam())) {
    for (int round = 0; round < 60 && !input.empty(); ++round) {
      std::string changed = input;
      const std::size_t at = random(changed.size());
      switch (round % 4) {
        case 0: changed[at] = static_cast<char>(random(256)); break;
        case 1: changed[at] = static_cast<char>(changed[at] ^ (1 << random(8))); break;
        case 2: changed.resize(at); break;
        case 3: changed.insert(at, changed.substr(at, 1 + random(40))); break;
      }
      GetParam().run(changed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, Corpus, ::testing::ValuesIn(targets()),
                         [](const auto& target) { return std::string(target.param.name); });

}  // namespace
}  // namespace weft::fuzz::corpus_test
