// The data of weft train: files of tokens, documents, held-out parts, and the order of samples.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tokenizer.hpp"
#include "tools/train_runs.hpp"
#include "training_data.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/loss.hpp"

namespace weft::test::train_data_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tools::DataConfig;
using tools::SampleOrder;
using tools::Sequences;
using tools::TokenFile;
using tools::TokenForm;
using tools::TrainingData;
constexpr std::int64_t kNone = CrossEntropy::kIgnore;

template <class Number>
std::string bytes_of(const std::vector<Number>& numbers) {
  std::string bytes(numbers.size() * sizeof(Number), '\0');
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// A file as numpy.save writes it, in version 1 or 2 of the format.
std::string npy(const std::string& type, const std::string& shape, const std::string& data, int version = 1) {
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}", type, shape);
  const std::size_t before = version == 1 ? 10 : 12;
  while ((before + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  const std::string length = version == 1 ? bytes_of(std::vector{static_cast<std::uint16_t>(header.size())})
                                          : bytes_of(std::vector{static_cast<std::uint32_t>(header.size())});
  return std::string("\x93NUMPY") + static_cast<char>(version) + '\0' + length + header + data;
}

class TrainDataTest : public TrainRuns {
 protected:
  std::string write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return file(name);
  }
  static std::vector<std::int64_t> all_of(const TokenFile& tokens) {
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < tokens.size(); ++i) all.push_back(tokens[i]);
    return all;
  }
  static std::string refusal(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& e) {
      return e.what();
    }
    return "nothing is refused";
  }
  // Values of a key in the metrics, with the steps that have it.
  std::vector<std::pair<std::int64_t, double>> column(const std::string& metrics, const char* key) {
    std::vector<std::pair<std::int64_t, double>> found;
    std::ifstream in(folder_ / metrics);
    for (std::string line; std::getline(in, line);)
      if (const auto j = nlohmann::json::parse(line); j.contains(key))
        found.emplace_back(j.at("step").get<std::int64_t>(), j.at(key).get<double>());
    return found;
  }
};

TEST_F(TrainDataTest, ReadsFilesOfTokens) {
  EXPECT_THAT(all_of(TokenFile(write("t", "a\xff"), TokenForm::text, "x")), ElementsAre(97, 255));
  const std::string two = bytes_of<std::uint16_t>({1, 65535}),
                    four = bytes_of<std::uint32_t>({7, 4000000000});
  EXPECT_THAT(all_of(TokenFile(write("t", two), TokenForm::uint16, "x")), ElementsAre(1, 65535));
  EXPECT_THAT(all_of(TokenFile(write("t", four), TokenForm::uint32, "x")), ElementsAre(7, 4000000000));
  for (const int version : {1, 2}) {
    const auto read = [&](const std::string& type, const std::string& data) {
      return all_of(TokenFile(write("t", npy(type, "(2,)", data, version)), TokenForm::npy, "x"));
    };
    EXPECT_THAT(read("|u1", "a\xff"), ElementsAre(97, 255));
    EXPECT_THAT(read("<u2", two), ElementsAre(1, 65535));
    EXPECT_THAT(read("<u4", four), ElementsAre(7, 4000000000));
    EXPECT_THAT(read("<i4", bytes_of<std::int32_t>({5, -2})), ElementsAre(5, -2));
    EXPECT_THAT(read("<i8", bytes_of<std::int64_t>({1LL << 40, 3})), ElementsAre(1LL << 40, 3));
  }
  EXPECT_EQ(tools::token_form("auto", "a.npy"), TokenForm::npy);
  EXPECT_EQ(tools::token_form("auto", "a.bin"), TokenForm::uint16);
  EXPECT_EQ(tools::token_form("auto", "a.txt"), TokenForm::text);
  EXPECT_EQ(tools::token_form("uint32", "a.bin"), TokenForm::uint32);
}

TEST_F(TrainDataTest, RefusesFilesThatAreNone) {
  const auto says = [&](const std::string& bytes, TokenForm form, const std::string& text) {
    const std::string name = write("t", bytes);
    EXPECT_EQ(refusal([&] { TokenFile(name, form, "text"); }), fmt::format("text \"{}\": {}", name, text));
  };
  const std::string two(4, '\1');
  says("", TokenForm::text, "is empty");
  says("abc", TokenForm::uint16, "has 3 bytes; expected a multiple of 2, the bytes of a token (uint16)");
  says("abcdef", TokenForm::uint32, "has 6 bytes; expected a multiple of 4, the bytes of a token (uint32)");
  says("nothing of the kind", TokenForm::npy, "is no file of numpy.save");
  says("\x93NUMPY", TokenForm::npy, "is no file of numpy.save");
  says(npy("<u2", "(2,)", two).substr(0, 40), TokenForm::npy, "ends within the header of numpy.save");
  says(npy("<f4", "(1,)", two), TokenForm::npy,
       "has elements of type \"<f4\"; expected |u1, <u2, <u4, <i4 or <i8");
  says(npy(">u2", "(2,)", two), TokenForm::npy,
       "has elements of type \">u2\"; expected |u1, <u2, <u4, <i4 or <i8");
  says(npy("<u2", "(1, 2)", two), TokenForm::npy, "has the shape (1, 2); expected one axis");
  says(npy("<u2", "()", two), TokenForm::npy, "has the shape (); expected one axis");
  says(npy("<u2", "(3,)", two), TokenForm::npy, "says that it has 3 tokens; there are 2");
  says(npy("<u2", "(0,)", two), TokenForm::npy, "says that it has 0 tokens; there are 2");
  says(npy("<u2", "(-1,)", two), TokenForm::npy, "says that it has -1 tokens; there are 2");
  ASSERT_EQ(::mkfifo(file("fifo").c_str(), 0600), 0);
  EXPECT_THAT(refusal([&] { TokenFile(file("fifo"), TokenForm::uint16, "text"); }),
              HasSubstr("is not a regular file (it is a FIFO)"));
  EXPECT_THAT(refusal([&] { TokenFile(file("nowhere"), TokenForm::uint16, "text"); }),
              HasSubstr("cannot open it: No such file or directory"));
}

TEST_F(TrainDataTest, LabelsStopWhereADocumentEnds) {
  DataConfig config{.text = write("t", "ab..cd..efghi"), .document_end = ".."};
  const auto drawn = [&](std::int64_t number) {
    Sequences s;
    TrainingData(config, 4).add(number, s);
    return s;
  };
  EXPECT_EQ(TrainingData(config, 4).population(), 9);
  EXPECT_THAT(drawn(0).tokens, ElementsAre('a', 'b', '.', '.'));
  EXPECT_THAT(drawn(0).labels, ElementsAre('b', '.', '.', kNone));
  EXPECT_THAT(drawn(2).labels, ElementsAre('.', kNone, 'd', '.'));
  EXPECT_THAT(drawn(2).documents, ElementsAre(0, 0, 1, 1));
  config.document_attention = "across";
  EXPECT_THAT(drawn(2).documents, ElementsAre());
  EXPECT_THAT(drawn(2).labels, ElementsAre('.', kNone, 'd', '.'));
  config.document_attention = "over";
  EXPECT_EQ(refusal([&] { drawn(2); }), "train: document-attention is \"over\"; expected inside or across");
  config.document_attention = "inside";
  config.document_end = "";
  EXPECT_EQ(refusal([&] { drawn(2); }),
            "train: document-attention is \"inside\" without document-end; expected document-end, too");
  config.document_attention = "";
  EXPECT_THAT(drawn(2).documents, ElementsAre());
  config.document_end = "x";
  EXPECT_THAT(drawn(2).labels, ElementsAre('.', 'c', 'd', '.'));
  config.draw = "sequences";
  EXPECT_EQ(TrainingData(config, 4).population(), 3);
  EXPECT_THAT(drawn(2).tokens, ElementsAre('e', 'f', 'g', 'h'));
  EXPECT_THAT(drawn(2).labels, ElementsAre('f', 'g', 'h', 'i'));
  // The number of a token, where tokens are numbers.
  config = {.text = write("t.bin", bytes_of<std::uint16_t>({5, 300, 7, 300, 9, 1})), .document_end = "300"};
  EXPECT_THAT(drawn(0).labels, ElementsAre(300, kNone, 300, kNone));
  config.document_end = "..";
  EXPECT_EQ(refusal([&] { drawn(0); }),
            "train: document-end is \"..\"; expected the number of a token, since the data are uint16");
}

TEST_F(TrainDataTest, TheHeldOutPartIsCutIntoSequences) {
  DataConfig config{.text = write("t", "abcdefghij.klmn.opqr"), .held_out = 0.5};
  const TrainingData data(config, 4);
  EXPECT_EQ(data.population(), 6);  // of abcdefghij
  EXPECT_EQ(data.held_out_tokens(), 9);
  EXPECT_EQ(data.held_out_sequences(), 3);
  Sequences s;
  for (const std::int64_t n : {0, 2, 3}) data.add_held_out(n, s);
  EXPECT_THAT(s.tokens, ElementsAre('.', 'k', 'l', 'm', 'q', 0, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(s.labels,
              ElementsAre('k', 'l', 'm', 'n', 'r', kNone, kNone, kNone, kNone, kNone, kNone, kNone));
  // With documents the parts meet at the end of one.
  config.document_end = ".";
  EXPECT_EQ(TrainingData(config, 4).population(), 7);
  EXPECT_EQ(TrainingData(config, 4).held_out_tokens(), 8);
  // Or another file.
  config = {.text = config.text, .held_out_file = write("h", "xyz")};
  EXPECT_EQ(TrainingData(config, 4).population(), 16);
  EXPECT_EQ(TrainingData(config, 4).held_out_tokens(), 2);

  const auto says = [&](const DataConfig& c, const std::string& text) {
    EXPECT_EQ(refusal([&] { TrainingData(c, 4); }), "train: " + text);
  };
  says({.text = config.text, .held_out_file = write("h", "x")},
       "held-out: 1 bytes are held out; expected 2 or more");
  says({.text = config.text, .held_out = 0.04}, "held-out: 1 bytes are held out; expected 2 or more");
  says({.text = config.text, .held_out = 0.8},
       fmt::format("text \"{}\" has 4 bytes that are not held out; expected at least 6 (sequence + 2)",
                   config.text.string()));
  says({.text = config.text, .held_out = 0.5, .held_out_file = "h"},
       "held-out is 0.5 and held-out-file \"h\"; expected one of them");
  says({.text = config.text, .held_out = 1}, "held-out is 1; expected 0 (nothing) or more, and less than 1");
  says({.text = config.text, .draw = "twice"}, "draw is \"twice\"; expected offsets or sequences");
  says({.text = config.text, .format = "u8"}, "format is \"u8\"; expected auto, text, uint16, uint32 or npy");
}

// The walk is that of a Sampler of any mesh and any batch, and each sample comes once in an epoch.
TEST_F(TrainDataTest, TheOrderOfSamplesDependsOnNoMesh) {
  for (const std::int64_t population : {5, 64, 65, 1000}) {
    const SampleOrder order(population, 7);
    std::vector<std::int64_t> seen;
    for (std::int64_t p = 0; p < population; ++p) seen.push_back(order.number(p));
    EXPECT_EQ(order.epoch(population - 1), 0);
    EXPECT_EQ(order.epoch(population), 1);
    std::vector<std::int64_t> second;
    for (std::int64_t p = population; p < 2 * population; ++p) second.push_back(order.number(p));
    EXPECT_NE(second, seen) << "an epoch has its own order";
    for (const int ranks : {1, 2, 3})
      for (const std::int64_t batch : {3, 8})
        for (int rank = 0; rank < ranks; ++rank) {
          const Sampler sampler(ranks, rank, population, batch, 7);
          const std::vector<std::int64_t> local = sampler.local_batch(2);
          for (std::size_t i = 0; i < local.size(); ++i)
            EXPECT_EQ(local[i],
                      order.number(2 * batch + sampler.part().offset + static_cast<std::int64_t>(i)));
        }
    std::ranges::sort(seen);
    for (std::int64_t p = 0; p < population; ++p) EXPECT_EQ(seen[static_cast<std::size_t>(p)], p);
  }
}

// ---- the program ----

// Tokens with the numbers of bytes give the bits of the text.
TEST_F(TrainDataTest, TrainsOnFilesOfTokens) {
  const std::string text = contents(folder_ / "text");
  std::vector<std::uint16_t> narrow;
  std::vector<std::uint32_t> wide;
  for (const char c : text) {
    narrow.push_back(static_cast<unsigned char>(c));
    wide.push_back(static_cast<unsigned char>(c));
  }
  ASSERT_EQ(run(small({"--metrics", file("m"), "--until", "6"})), 0) << err();
  const std::vector<double> whole = losses("m");
  write("a.bin", bytes_of(narrow));
  write("a.u32", bytes_of(wide));
  write("a.npy", npy("<u2", fmt::format("({},)", narrow.size()), bytes_of(narrow)));
  for (const Words& words : {Words{file("a.bin")}, {file("a.u32"), "--format", "uint32"}, {file("a.npy")}}) {
    Words all = small({"--metrics", file("m"), "--until", "6", "--text"});
    all.insert(all.end(), words.begin(), words.end());
    ASSERT_EQ(run(all), 0) << err();
    EXPECT_EQ(losses("m"), whole) << words[0];
  }
  write("b.bin", bytes_of(std::vector<std::uint16_t>(100, 256)));
  EXPECT_EQ(run(small({"--text", file("b.bin")})), 2);
  EXPECT_THAT(err(), HasSubstr("256"));
}

TEST_F(TrainDataTest, EvaluatesOnWhatIsHeldOut) {
  const Words evaluated{"--held-out", "0.2", "--eval-every", "8", "--metrics"};
  const auto with = [&](Words more) {
    more.insert(more.begin(), evaluated.begin(), evaluated.end());
    return small(more);
  };
  ASSERT_EQ(run(with({file("one")})), 0) << err();
  const auto one = column("one", "eval_loss");
  ASSERT_EQ(one.size(), 3u);
  EXPECT_EQ(one[0].first, 7);
  EXPECT_EQ(one[1].first, 15);
  EXPECT_EQ(one[2].first, 19) << "after the last step, too";
  EXPECT_LT(one[2].second, one[0].second);
  EXPECT_EQ(losses("one").size(), 20u);
  for (const auto& [step, perplexity] : column("one", "eval_perplexity"))
    EXPECT_NEAR(std::log(perplexity),
                step == 7    ? one[0].second
                : step == 15 ? one[1].second
                             : one[2].second,
                1e-9);
  const auto size = static_cast<double>(contents(folder_ / "text").size());
  EXPECT_EQ(column("one", "eval_tokens")[0].second, std::round(size * 0.2) - 1);
  EXPECT_THAT(
      out(), HasSubstr(fmt::format("held-out loss {:.4f} nats per byte, perplexity {:.3f}, over {:.0f} bytes",
                                   one[2].second, std::exp(one[2].second), std::round(size * 0.2) - 1)));
  EXPECT_THAT(out(), HasSubstr(" held-out "));
  // The bar's last line, and every mesh.
  for (const Words& mesh : {Words{"--ranks", "2"},
                            {"--ranks", "2", "--tp", "2"},
                            {"--ranks", "2", "--data", "fsdp"},
                            {"--ranks", "2", "--pp", "2", "--micro-batches", "2"},
                            {"--micro-batches", "3"},
                            {"--ranks", "3"}}) {
    Words words = with({file("two")});
    words.insert(words.end(), mesh.begin(), mesh.end());
    ASSERT_EQ(run(words), 0) << err();
    const auto two = column("two", "eval_loss");
    ASSERT_EQ(two.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(two[i].second, one[i].second, 2e-4) << mesh.back();
  }
  // The same parts as two files.
  const std::string text = contents(folder_ / "text");
  const std::size_t cut = text.size() - static_cast<std::size_t>(std::round(size * 0.2));
  write("head", text.substr(0, cut));
  write("tail", text.substr(cut));
  ASSERT_EQ(run(small({"--text", file("head"), "--held-out-file", file("tail"), "--eval-every", "8",
                       "--metrics", file("two")})),
            0)
      << err();
  EXPECT_EQ(losses("two"), losses("one"));
  EXPECT_EQ(column("two", "eval_loss"), one);
}

// Two evaluations after the first gain too little; an interrupted run goes on counting.
TEST_F(TrainDataTest, EndsIfEvaluationsDoNotGain) {
  const auto with = [&](Words more) {
    const Words all{"--held-out", "0.2",          "--eval-every", "2",         "--patience",
                    "2",          "--least-gain", "100",          "--metrics", file("m")};
    more.insert(more.begin(), all.begin(), all.end());
    return small(more);
  };
  const std::string end = "ended after step 6 of 20: 2 evaluations in a row without a lower loss than ";
  ASSERT_EQ(run(with({"--ranks", "2"})), 0) << err();
  EXPECT_THAT(out(), HasSubstr(end));
  EXPECT_EQ(losses("m").size(), 6u);
  ASSERT_EQ(run(with({"--save", file("run"), "--until", "4"})), 0) << err();
  ASSERT_EQ(run(with({"--save", file("run"), "--resume"})), 0) << err();
  EXPECT_THAT(out(), HasSubstr(end));
  EXPECT_EQ(losses("m").size(), 6u);
}

// Rows without labels fill the last batch up: the mean is over the tokens that there are.
TEST_F(TrainDataTest, TheMeanIsOverTheTokensWhateverTheBatch) {
  const auto loss_of = [&](const Words& more) {
    Words words = small({"--held-out", "0.1", "--lr", "0", "--until", "1", "--metrics", file("m")});
    words.insert(words.end(), more.begin(), more.end());
    EXPECT_EQ(run(words), 0) << err();
    const auto found = column("m", "eval_loss");
    EXPECT_EQ(found.size(), 1u);
    return std::pair(found[0].second, column("m", "eval_tokens")[0].second);
  };
  const auto four = loss_of({});
  const auto seven = loss_of({"--batch", "7"});
  EXPECT_NEAR(four.first, seven.first, 1e-5);
  EXPECT_EQ(four.second, seven.second);
  EXPECT_EQ(loss_of({"--eval-batches", "2"}).second, 2 * 4 * 32);
}

// Exact mode, so that one wrong sample shows: the run goes on over other meshes.
TEST_F(TrainDataTest, AResumedRunDrawsTheNextSamplesOnAnyMesh) {
  const auto with = [&](const Words& more) {
    Words words = small({"--exact", "--batch", "8", "--held-out", "0.1", "--draw", "sequences",
                         "--document-end", "dog\n", "--eval-every", "5"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  ASSERT_EQ(run(with({"--metrics", file("whole"), "--until", "9"})), 0) << err();
  ASSERT_EQ(run(with({"--save", file("run"), "--metrics", file("m"), "--until", "3"})), 0) << err();
  ASSERT_EQ(
      run(with({"--save", file("run"), "--metrics", file("m"), "--until", "6", "--resume", "--ranks", "2"})),
      0)
      << err();
  ASSERT_EQ(run(with({"--save", file("run"), "--metrics", file("m"), "--until", "9", "--resume", "--ranks",
                      "4", "--tp", "2", "--data", "fsdp"})),
            0)
      << err();
  EXPECT_EQ(losses("m"), losses("whole"));
  const auto parts = column("m", "eval_loss");  // also where a part ended
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_EQ((std::vector{parts[1], parts[3]}), column("whole", "eval_loss"));
  EXPECT_EQ(column("m", "epoch"), column("whole", "epoch"));
  EXPECT_EQ(run(with({"--save", file("run"), "--resume", "--draw", "offsets", "--held-out", "0",
                      "--eval-every", "0", "--document-end", "a b"})),
            2);
  EXPECT_THAT(
      err(), HasSubstr("--document-end is \"dog\\n\" there and \"a\\u0020b\" here, --draw is sequences there "
                       "and not set here, --held-out is 0.1 there and not set here"));
}

// A pipeline, too, has the losses of documents that do not see each other.
TEST_F(TrainDataTest, AttentionStopsWhereADocumentEnds) {
  std::ofstream text(folder_ / "documents");
  for (int i = 0; i < 600; ++i)
    text << fmt::format("{:c}quick{:02}|brown{:c}\n", 'a' + i % 26, i % 89, 'a' + i % 7);
  text.close();
  const Words same{"--text",         file("documents"),
                   "--document-end", "\n",
                   "--draw",         "sequences",
                   "--seq",          "32",
                   "--batch",        "4",
                   "--held-out",     "0.1"};
  const auto with = [&](const Words& more) {
    Words words = small(same);
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const auto losses_with = [&](const std::string& name, const Words& more) {
    Words words = with(more);
    words.insert(words.end(), {"--metrics", file(name), "--until", "6"});
    EXPECT_EQ(run(words), 0) << err();
    return losses(name);
  };
  const auto inside = losses_with("inside", {});
  const auto across = losses_with("across", {"--document-attention", "across"});
  ASSERT_EQ(inside.size(), 6u);
  EXPECT_NE(inside[0], across[0]);
  EXPECT_NE(column("inside", "eval_loss"), column("across", "eval_loss"));
  const auto pipeline = losses_with("pp", {"--ranks", "4", "--pp", "2", "--tp", "2", "--micro-batches", "2"});
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(pipeline[i], inside[i], 1e-4) << i;

  std::ofstream(file("c.toml")) << "[data]\ndocument_attention = \"across\"\n";
  EXPECT_EQ(losses_with("config", {"--config", file("c.toml"), "--save", file("run")}), across);
  EXPECT_EQ(run(with({"--save", file("run"), "--resume"})), 2);
  EXPECT_THAT(err(), HasSubstr("--document-attention is not set there and inside here"));
}

// The checkpoint counts samples: a batch of another size goes on with the next one.
TEST_F(TrainDataTest, BatchesMayHaveAnotherSizeAfterAResume) {
  const auto with = [&](const Words& more) {
    Words words = small({"--lr", "0"});  // so that a loss tells which samples it is of
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  ASSERT_EQ(run(with({"--save", file("run"), "--metrics", file("m"), "--until", "4"})), 0) << err();
  ASSERT_EQ(
      run(with({"--save", file("run"), "--metrics", file("m"), "--until", "6", "--batch", "8", "--resume"})),
      0)
      << err();
  EXPECT_THAT(out(), HasSubstr("another schedule from step 4 on: --batch is 4 there and 8 here"));
  ASSERT_EQ(run(with({"--metrics", file("eight"), "--until", "4", "--batch", "8"})), 0) << err();
  EXPECT_EQ(losses("m")[4], losses("eight")[2]);
  EXPECT_EQ(losses("m")[5], losses("eight")[3]);
  ASSERT_EQ(run({"checkpoint", "inspect", file("run")}), 0);
  EXPECT_THAT(contents(folder_ / "run/step-00000006/index.json"), HasSubstr("\"train.samples\""));
}

// ---- tokenizers ----

// A model of the tokens of a tokenizer.json, which then lies beside the run, where weft sample finds it.
TEST_F(TrainDataTest, TrainsAndSamplesWithATokenizer) {
  const std::string tokenizer = std::string(WEFT_TOKENIZERS) + "/gpt2.json";
  const Words words = small({"--tokenizer", tokenizer, "--held-out", "0.1", "--save", file("run"),
                             "--metrics", file("m"), "--steps", "60", "--document-end", "<|endoftext|>"});
  ASSERT_EQ(run(words), 0) << err();
  EXPECT_THAT(out(), HasSubstr(" tokens of text a step"));
  EXPECT_THAT(out(), HasSubstr(" nats per token, "));
  EXPECT_THAT(out(), ::testing::ContainsRegex(
                         "held-out loss [0-9.]+ nats per token, perplexity [0-9.]+, over [0-9]+ tokens"));
  EXPECT_NEAR(losses("m")[0], std::log(400.), 0.3);
  EXPECT_EQ(contents(folder_ / "run/tokenizer.json"), contents(tokenizer));

  // The tokens of the text as a file give the same bits; its vocabulary has to be given.
  const tools::Tokenizer read(contents(tokenizer), "gpt2");
  std::vector<std::uint16_t> tokens;
  for (const std::uint32_t t : read.encode(contents(folder_ / "text")))
    tokens.push_back(static_cast<std::uint16_t>(t));
  write("a.bin", bytes_of(tokens));
  ASSERT_EQ(run(small({"--text", file("a.bin"), "--vocab-size", "400", "--held-out", "0.1", "--metrics",
                       file("n"), "--steps", "60", "--document-end", "0"})),
            0)
      << err();
  EXPECT_EQ(losses("n"), losses("m"));
  EXPECT_EQ(column("n", "eval_loss"), column("m", "eval_loss"));
  EXPECT_EQ(run(small({"--text", file("a.bin")})), 2) << "there are tokens above 255";

  const auto sample = [&](const Words& more) {
    Words all{"sample", file("run"), "--prompt", "the quick", "--temperature", "0"};
    all.insert(all.end(), more.begin(), more.end());
    EXPECT_EQ(run(all), 0) << err();
    return out();
  };
  const std::string text = sample({"--tokens", "8"});
  EXPECT_THAT(text, ::testing::StartsWith("the quick brown fox "));
  EXPECT_EQ(sample({"--tokens", "8", "--ranks", "2", "--tp", "2"}), text);
  EXPECT_THAT(sample({"--tokens", "30", "--stop", " fox"}), ::testing::EndsWith(" fox\n"));
  // A stop is a text: it may lie inside of a token, or in several.
  EXPECT_EQ(sample({"--tokens", "30", "--stop", " fo"}), "the quick brown fo\n");
  EXPECT_EQ(sample({"--tokens", "30", "--stop", "wn f", "--stop", "never"}), "the quick brown f\n");
  EXPECT_EQ(sample({"--tokens", "30", "--stop", "wn f", "--ranks", "2", "--tp", "2"}), "the quick brown f\n");
  const auto stopped = nlohmann::json::parse(sample({"--tokens", "30", "--stop", "ow", "--json"}));
  EXPECT_EQ(stopped.at("text"), " brow");
  EXPECT_TRUE(stopped.at("stopped").get<bool>());
  EXPECT_THAT(read.decode(stopped.at("tokens").get<std::vector<std::int64_t>>()),
              ::testing::StartsWith(" brow"));
  const auto json = nlohmann::json::parse(sample({"--tokens", "8", "--json"}));
  EXPECT_EQ("the quick" + json.at("text").get<std::string>() + "\n", text);
  EXPECT_EQ(json.at("tokens").size(), 8u);
  EXPECT_EQ(read.decode(json.at("tokens").get<std::vector<std::int64_t>>()),
            json.at("text").get<std::string>());
  EXPECT_EQ(sample({"--tokens", "8", "--tokenizer", tokenizer}), text);
  // The tokenizer goes along to the form of Llama models and back.
  ASSERT_EQ(run({"checkpoint", "export", file("run"), file("llama"), "--as", "llama"}), 0) << err();
  EXPECT_EQ(contents(folder_ / "llama/tokenizer.json"), contents(tokenizer));
  ASSERT_EQ(run({"checkpoint", "convert", file("llama"), file("back"), "--as", "llama"}), 0) << err();
  ASSERT_EQ(run({"sample", file("back"), "--prompt", "the quick", "--temperature", "0", "--tokens", "8"}), 0)
      << err();
  EXPECT_EQ(out(), text);

  const auto expect = [&](const Words& all, const std::string& why) {
    EXPECT_EQ(run(all), 2) << why;
    EXPECT_THAT(err(), HasSubstr(why));
  };
  expect({"sample", file("run"), "--prompt", "\xff"},
         "sample: --prompt: tokenizer: the text is no UTF-8 at byte 0 (0xff)");
  expect({"sample", file("run"), "--tokenizer", std::string(WEFT_TOKENIZERS) + "/llama3.json"},
         "is of a model of 400 tokens; the tokenizer has ");
  write("run/tokenizer.json", contents(std::string(WEFT_TOKENIZERS) + "/spaced.json"));
  expect({"sample", file("run")},
         fmt::format("sample: \"{}\" is not the tokenizer of ", file("run/tokenizer.json")));
  std::filesystem::remove(file("run/tokenizer.json"));
  EXPECT_NE(run({"sample", file("run")}), 0);
  EXPECT_THAT(err(), HasSubstr("sample: tokenizer \"" + file("run/tokenizer.json") + "\": cannot open it"));
  expect(small({"--save", file("run"), "--resume", "--vocab-size", "400", "--held-out", "0.1"}),
         "--tokenizer is ");
}

TEST_F(TrainDataTest, RefusesTokenizersThatDoNotFit) {
  const auto expect = [&](const Words& words, const std::string& text) {
    EXPECT_EQ(run(small(words)), 2) << text;
    EXPECT_THAT(err(), HasSubstr(text));
  };
  const std::string gpt2 = std::string(WEFT_TOKENIZERS) + "/gpt2.json";
  expect({"--tokenizer", file("text")}, "train: tokenizer \"" + file("text") + "\": is no tokenizer.json: ");
  expect({"--tokenizer", gpt2, "--vocab-size", "300"},
         "train: vocab is 300; expected 400 or more: the tokens of \"" + gpt2 + "\"");
  expect({"--tokenizer", gpt2, "--document-end", "a"},
         "train: document-end is \"a\", an ordinary token of the tokenizer, which merges may join");
  // Also in a file of tokens, where merges have joined it before.
  write("merged.bin", bytes_of(std::vector<std::uint16_t>(400, 7)));
  expect({"--text", file("merged.bin"), "--tokenizer", gpt2, "--document-end", "a"},
         "train: document-end is \"a\", an ordinary token of the tokenizer, which merges may join");
  expect({"--tokenizer", gpt2, "--document-end", "two words"},
         "train: document-end is \"two words\", which are ");
  expect({"--text", write("bad", std::string(500, 'a') + "\xff"), "--tokenizer", gpt2},
         "train: text \"" + file("bad") + "\": tokenizer: the text is no UTF-8 at byte 500 (0xff)");
  expect({"--vocab-size", "100"}, "train: vocab is 100; expected 256 or more: one for each byte");
  EXPECT_NE(run(small({"--tokenizer", file("nowhere")})), 0);
  EXPECT_THAT(err(), HasSubstr("train: tokenizer \"" + file("nowhere") + "\": cannot open it"));
  // The table [model] may make the vocabulary larger than the tokenizer.
  write("run.toml", "[model]\nvocab = 448\ndim = 32\nlayers = 1\n[data]\ntokenizer = '" + gpt2 + "'\n");
  Words words{"train",   "--config", file("run.toml"), "--text", file("text"), "--seq", "16",
              "--batch", "2",        "--steps",        "2"};
  EXPECT_EQ(run(words), 0) << err();
  EXPECT_EQ(run({"parity", "--text", file("text"), "--tokenizer", gpt2, "--steps", "4", "--seq", "16",
                 "--batch", "2", "--dim", "32", "--meshes", "1x1,1x2"}),
            0)
      << err();
}

TEST_F(TrainDataTest, RefusesEvaluationsOfNothing) {
  const auto expect = [&](const Words& words, const std::string& text) {
    EXPECT_EQ(run(small(words)), 2) << text;
    EXPECT_THAT(err(), HasSubstr(text));
  };
  expect({"--eval-every", "3"}, "--eval-every: needs --held-out or --held-out-file, to evaluate on");
  expect({"--eval-batches", "3"}, "--eval-batches: needs --held-out or --held-out-file, to evaluate on");
  expect({"--patience", "2", "--held-out", "0.1"}, "--patience: needs --eval-every, which says when the run");
  expect({"--least-gain", "2"}, "--least-gain: needs --patience, the evaluations that may gain less");
  expect({"--held-out", "1"}, "train: held-out is 1; expected 0 (nothing) or more, and less than 1");
  expect({"--held-out", "nan"}, "train: held-out is nan; expected 0 (nothing) or more, and less than 1");
  expect({"--held-out", "0.1", "--held-out-file", file("text")}, "expected one of them");
  expect({"--draw", "twice"}, "train: draw is \"twice\"; expected offsets or sequences");
  expect({"--format", "u8"}, "train: format is \"u8\"; expected auto, text, uint16, uint32 or npy");
  expect({"--format", "uint16", "--document-end", "x"},
         "train: document-end is \"x\"; expected the number of a token");
  EXPECT_NE(run(small({"--held-out-file", file("nowhere")})), 0);
  EXPECT_THAT(err(), HasSubstr("train: held-out-file \"" + file("nowhere") + "\": cannot open it"));
  expect({"--eval-every", "-1", "--held-out", "0.1"}, "--eval-every is -1; expected 0 or more");
  // weft parity takes the same data.
  EXPECT_EQ(run({"parity", "--text", file("text"), "--held-out", "0.1", "--steps", "4", "--seq", "16",
                 "--batch", "2", "--dim", "32", "--meshes", "1x1,1x2", "--draw", "sequences"}),
            0)
      << err();
}

// The ends of documents have no label: a held-out batch of nothing else is left out.
TEST_F(TrainDataTest, HeldOutBatchesWithoutLabelsAreLeftOut) {
  const auto held_out = [&](const std::string& text) {
    std::ofstream(file("held")) << text;
    return run(small({"--held-out-file", file("held"), "--document-end", "\n", "--eval-every", "5", "--steps",
                      "5", "--warmup", "0"}));
  };
  ASSERT_EQ(held_out(std::string(700, 'a') + std::string(2000, '\n')), 0) << err();
  EXPECT_THAT(out(), HasSubstr("held-out loss"));
  EXPECT_NE(held_out(std::string(2000, '\n')), 0);
  EXPECT_THAT(err(), HasSubstr("no held-out token has a label; expected more held-out text"));
}

}  // namespace
}  // namespace weft::test::train_data_test
