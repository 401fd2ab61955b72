// The bar of weft train and its files with the steps: JSON lines, CSV, events of TensorBoard, curves.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/text/plain_streams.hpp"
#include "event_file.hpp"
#include "support/terminal.hpp"
#include "tools/train_runs.hpp"
#include "weft/base/clock.hpp"

namespace weft::test::train_log_test {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- readers of their own, which know the formats and nothing of the writers ----

template <class Value>
Value value_at(const std::string& bytes, std::size_t at) {
  Value value{};
  EXPECT_LE(at + sizeof value, bytes.size());
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// CRC-32 and CRC-32C by their polynomials, the highest bit first on both sides turned round.
std::uint32_t crc_of(const std::string& bytes, std::uint32_t polynomial) {
  std::uint32_t crc = ~0U;
  for (const char c : bytes) {
    std::uint32_t part = (crc ^ static_cast<unsigned char>(c)) & 0xff;
    for (int k = 0; k < 8; ++k) part = (part >> 1) ^ (part % 2 == 1 ? polynomial : 0);
    crc = (crc >> 8) ^ part;
  }
  return ~crc;
}

// The fields of a message of protocol buffers: numbers, and bytes.
struct Message {
  std::map<unsigned, std::uint64_t> numbers;
  std::multimap<unsigned, std::string> texts;
  explicit Message(const std::string& bytes) {
    std::size_t at = 0;
    const auto varint = [&] {
      std::uint64_t value = 0;
      for (unsigned shift = 0;; shift += 7) {
        const auto byte = static_cast<unsigned char>(bytes.at(at++));
        value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
        if (byte < 0x80) return value;
      }
    };
    while (at < bytes.size()) {
      const std::uint64_t key = varint();
      const auto field = static_cast<unsigned>(key >> 3);
      if (key % 8 == 0) {
        numbers[field] = varint();
      } else if (key % 8 == 1) {
        numbers[field] = value_at<std::uint64_t>(bytes, at), at += 8;
      } else if (key % 8 == 5) {
        numbers[field] = value_at<std::uint32_t>(bytes, at), at += 4;
      } else {
        EXPECT_EQ(key % 8, 2u);
        const std::size_t length = varint();
        texts.emplace(field, bytes.substr(at, length)), at += length;
      }
    }
  }
};

// Tag to (step, value), of all files in a folder, in the order of their names. A START drops later steps.
using Scalars = std::map<std::string, std::map<std::int64_t, float>>;
Scalars events_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::ranges::sort(files);
  Scalars all;
  for (const auto& file : files) {
    EXPECT_THAT(file.filename().string(), ::testing::StartsWith("events.out.tfevents."));
    const std::string bytes = contents(file);
    bool first = true;
    for (std::size_t at = 0; at < bytes.size();) {
      const auto length = value_at<std::uint64_t>(bytes, at);
      const auto masked = [](std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8U; };
      EXPECT_EQ(value_at<std::uint32_t>(bytes, at + 8), masked(crc_of(bytes.substr(at, 8), 0x82f63b78)));
      const std::string event = bytes.substr(at + 12, length);
      EXPECT_EQ(value_at<std::uint32_t>(bytes, at + 12 + length), masked(crc_of(event, 0x82f63b78)));
      at += 16 + length;
      const Message m(event);
      EXPECT_EQ(m.texts.contains(3), first) << "the version comes first";
      if (first) {
        EXPECT_EQ(m.texts.find(3)->second, "brain.Event:2");
      }
      first = false;
      const auto step = static_cast<std::int64_t>(m.numbers.at(2));
      if (const auto session = m.texts.find(7); session != m.texts.end()) {
        EXPECT_EQ(Message(session->second).numbers.at(1), 1u);
        for (auto& [tag, values] : all) values.erase(values.lower_bound(step), values.end());
      }
      if (const auto summary = m.texts.find(5); summary != m.texts.end()) {
        const Message values(summary->second);
        for (const auto& [field, text] : values.texts) {
          const Message value(text);
          const auto bits = static_cast<std::uint32_t>(value.numbers.at(2));
          all[value.texts.find(1)->second][step] = std::bit_cast<float>(bits);
        }
      }
    }
  }
  return all;
}

// The number of pixels of each colour of a PNG with four bits a pixel that is not compressed.
std::map<std::uint32_t, std::int64_t> pixels_of(const std::string& png, int& width, int& height) {
  std::map<std::uint32_t, std::int64_t> colours;
  EXPECT_EQ(png.substr(0, 8), "\x89PNG\r\n\x1a\n");
  const auto number = [&](const std::string& of, std::size_t at) {
    return __builtin_bswap32(value_at<std::uint32_t>(of, at));
  };
  std::map<std::string, std::string> parts;
  for (std::size_t at = 8; at < png.size();) {
    const std::size_t length = number(png, at);
    parts[png.substr(at + 4, 4)] = png.substr(at + 8, length);
    EXPECT_EQ(number(png, at + 8 + length), crc_of(png.substr(at + 4, 4 + length), 0xedb88320));
    at += 12 + length;
  }
  EXPECT_TRUE(parts.contains("IEND"));
  width = static_cast<int>(number(parts["IHDR"], 0)), height = static_cast<int>(number(parts["IHDR"], 4));
  EXPECT_EQ(parts["IHDR"].substr(8), std::string("\x04\x03\0\0\0", 5));
  const std::string& packed = parts["IDAT"];
  EXPECT_EQ((static_cast<unsigned char>(packed[0]) * 256U + static_cast<unsigned char>(packed[1])) % 31, 0u);
  std::string rows;
  std::size_t at = 2;
  for (bool last = false; !last;) {
    last = packed.at(at) == 1;
    const auto length = value_at<std::uint16_t>(packed, at + 1);
    EXPECT_EQ(value_at<std::uint16_t>(packed, at + 3), static_cast<std::uint16_t>(~length));
    rows += packed.substr(at + 5, length);
    at += 5u + length;
  }
  std::uint32_t a = 1, b = 0;
  for (const char c : rows) a = (a + static_cast<unsigned char>(c)) % 65521, b = (b + a) % 65521;
  EXPECT_EQ(number(packed, at), b << 16 | a);
  const std::size_t of_row = static_cast<std::size_t>(width) / 2 + 1;
  EXPECT_EQ(rows.size(), of_row * static_cast<std::size_t>(height));
  const std::string& palette = parts["PLTE"];
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (i % of_row != 0)
      for (const unsigned index :
           {static_cast<unsigned char>(rows[i]) / 16U, static_cast<unsigned char>(rows[i]) % 16U}) {
        const auto byte = [&](std::size_t k) {
          return static_cast<std::uint32_t>(static_cast<unsigned char>(palette.at(3 * index + k)));
        };
        ++colours[byte(0) << 16 | byte(1) << 8 | byte(2)];
      }
  return colours;
}

class TrainLogTest : public TrainRuns {
 protected:
  std::vector<nlohmann::json> metrics(const std::string& name) {
    std::vector<nlohmann::json> lines;
    std::ifstream in(folder_ / name);
    for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  std::vector<std::map<std::string, std::string>> table(const std::string& name) {
    std::ifstream in(folder_ / name);
    const auto cells = [](const std::string& line) {
      std::vector<std::string> all;
      std::size_t at = 0;
      for (std::size_t end; (end = line.find(',', at)) != std::string::npos; at = end + 1)
        all.push_back(line.substr(at, end - at));
      all.push_back(line.substr(at));
      return all;
    };
    std::string line;
    std::getline(in, line);
    const std::vector<std::string> head = cells(line);
    std::vector<std::map<std::string, std::string>> rows;
    while (std::getline(in, line)) {
      const std::vector<std::string> values = cells(line);
      EXPECT_EQ(values.size(), head.size()) << line;
      rows.emplace_back();
      for (std::size_t i = 0; i < std::min(head.size(), values.size()); ++i) rows.back()[head[i]] = values[i];
    }
    return rows;
  }
  Words logged(Words more) {
    Words words = small({"--held-out", "0.2", "--eval-every", "4", "--metrics", file("m"), "--csv", file("c"),
                         "--tensorboard", file("tb"), "--curves", file("l.svg"), "--until", "10"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

TEST(EventFileTest, HasTheChecksumOfCastagnoli) {
  // The check value of CRC-32C in catalogues is that of these digits.
  EXPECT_EQ(crc_of("123456789", 0x82f63b78), 0xe3069283u);
  EXPECT_EQ(tools::masked_crc("123456789"), ((0xe3069283u >> 15) | (0xe3069283u << 17)) + 0xa282ead8u);
}

// All files have the same numbers, over a resume, too, from which on steps are taken again.
TEST_F(TrainLogTest, AllFilesHaveTheSameSteps) {
  for (const Words& part : {Words{"--until", "6"}, Words{"--resume"}}) {
    Words words = logged({"--save", file("run"), "--ranks", "2", "--save-every", "5"});
    words.insert(words.end(), part.begin(), part.end());
    ASSERT_EQ(run(words), 0) << err();
    // As a kill leaves it: the run goes on from step 5, and repeats a step.
    if (part[0] == "--until") {
      std::filesystem::remove_all(folder_ / "run/step-00000006");
      std::filesystem::remove(folder_ / "run/latest");
      std::ofstream(folder_ / "c", std::ios::app) << "6,0,9";
      std::ofstream(folder_ / "run/latest") << "step-00000005\n";
    }
  }
  EXPECT_THAT(out(), HasSubstr("resumed at step 5"));
  const auto lines = metrics("m");
  const auto rows = table("c");
  Scalars events = events_in(folder_ / "tb");
  ASSERT_EQ(lines.size(), 10u);
  ASSERT_EQ(rows.size(), 10u);
  EXPECT_EQ(events["train/loss"].size(), 10u);
  const std::map<std::string, std::string> tags{{"loss", "train/loss"},
                                                {"grad_norm", "train/grad_norm"},
                                                {"lr", "train/lr"},
                                                {"epoch", "train/epoch"},
                                                {"tokens_per_s", "speed/tokens_per_s"},
                                                {"memory_mib", "speed/memory_mib"},
                                                {"peak_share", "speed/peak_share"},
                                                {"eval_loss", "eval/loss"},
                                                {"eval_perplexity", "eval/perplexity"}};
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(lines[i].at("step"), i);
    EXPECT_EQ(rows[i].at("step"), std::to_string(i));
    EXPECT_GT(lines[i].at("memory_mib").get<double>(), 1);
    const bool evaluated = i == 3 || i == 7 || i == 9;
    EXPECT_EQ(lines[i].contains("eval_loss"), evaluated) << i;
    EXPECT_EQ(rows[i].at("eval_loss").empty(), !evaluated) << i;
    for (const auto& [key, tag] : tags) {
      const auto at = events[tag].find(static_cast<std::int64_t>(i));
      ASSERT_EQ(lines[i].contains(key), at != events[tag].end()) << key << i;
      if (!lines[i].contains(key)) continue;
      const double value = lines[i].at(key);
      EXPECT_EQ(std::stod(rows[i].at(key)), value) << key;
      EXPECT_EQ(at->second, static_cast<float>(value)) << key;
    }
  }
  const std::string svg = contents(folder_ / "l.svg");
  EXPECT_THAT(svg, AllOf(HasSubstr("<svg "), HasSubstr(">training</text>"), HasSubstr(">held out</text>"),
                         HasSubstr(">nats per byte</text>"), ::testing::EndsWith("</svg>\n")));
  const auto lines_of = [&](const char* colour) {
    std::size_t count = 0;
    for (std::size_t at = 0; (at = svg.find(fmt::format("stroke=\"{}\"", colour), at)) != std::string::npos;
         ++at)
      ++count;
    return count;
  };
  EXPECT_EQ(lines_of("#0072b2"), 10u + 1) << "ten points, those before the resume, too, and the legend";
  EXPECT_EQ(lines_of("#d55e00"), 3u + 1);
}

// The reader of TensorBoard itself, where WEFT_TEST_PYTHON has it.
TEST_F(TrainLogTest, TensorBoardReadsItsEvents) {
  const char* const named = std::getenv("WEFT_TEST_PYTHON");
  const std::string python = named != nullptr ? named : "python3";
  std::ofstream(folder_ / "read.py")
      << "import sys\n"
         "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
         "a = EventAccumulator(sys.argv[1])\na.Reload()\n"
         "for tag in sorted(a.Tags()['scalars']):\n"
         "  for e in a.Scalars(tag): print(tag, e.step, repr(e.value))\n";
  if (std::system(fmt::format("{} -c 'import tensorboard' >/dev/null 2>&1", python).c_str()) != 0)
    GTEST_SKIP() << "tensorboard is not installed for " << python << " (WEFT_TEST_PYTHON)";
  ASSERT_EQ(run(logged({})), 0) << err();
  ASSERT_EQ(
      std::system(fmt::format("{} {} {} > {} 2>/dev/null", python, file("read.py"), file("tb"), file("read"))
                      .c_str()),
      0);
  Scalars read;
  FileIn in(folder_ / "read");  // numbers have points in any locale
  std::string tag;
  std::int64_t step = 0;
  for (double value = 0; in >> tag >> step >> value;) read[tag][step] = static_cast<float>(value);
  EXPECT_EQ(read, events_in(folder_ / "tb"));
  EXPECT_EQ(read["train/loss"].size(), 10u);
}

TEST_F(TrainLogTest, CurvesMayBeAPng) {
  ASSERT_EQ(run(logged({"--curves", file("l.png")})), 0) << err();
  int width = 0, height = 0;
  const auto colours = pixels_of(contents(folder_ / "l.png"), width, height);
  EXPECT_EQ(width, 800);
  EXPECT_EQ(height, 480);
  EXPECT_GT(colours.at(0xffffff), 800 * 480 / 2);
  EXPECT_GT(colours.at(0x0072b2), 400) << "the curve of training, and its legend";
  EXPECT_GT(colours.at(0xd55e00), 200);
  EXPECT_GT(colours.at(0x000000), 500) << "words";
  EXPECT_EQ(run(small({"--curves", file("l.jpg")})), 2);
  EXPECT_THAT(err(), HasSubstr("train: curves is \"" + file("l.jpg") +
                               "\"; expected a name that ends in .svg or .png"));
}

// 80 x 24: one line, with all that is known of the run.
TEST_F(TrainLogTest, TheBarShowsAllOnAUsualTerminal) {
  Words words = small(
      {"--held-out", "0.2", "--eval-every", "1", "--eval-batches", "1", "--steps", "12345", "--until", "3"});
  *std::next(std::ranges::find(words, "--progress")) = "bar";
  words.insert(words.begin(), WEFT_COMMAND);
  const OnATerminal got = run_on_a_terminal(std::move(words), 80, seconds(60), [] {
    for (const char* inherited : {"WEFT_RANK", "RANK", "WEFT_STORE", "COLUMNS", "WEFT_TERMINAL"})
      ::unsetenv(inherited);
  });
  ASSERT_TRUE(got.status && got.status->code == 0) << got.text;
  const std::size_t end = got.text.rfind("\x1b[K\r"), begin = got.text.rfind("step 3/", end);
  ASSERT_NE(begin, std::string::npos) << got.text;
  const std::string bar = got.text.substr(begin, end - begin);
  EXPECT_LT(bar.size(), 80u);
  EXPECT_THAT(
      bar, ::testing::ContainsRegex("^step 3/[0-9]+ loss [0-9.]+ held [0-9.]+ lr [0-9.e-]+ norm [0-9.e+-]+ "
                                    "[0-9.]+k? tok/s [0-9]+% [0-9.]+M"));
}

TEST_F(TrainLogTest, APipeGetsPlainLines) {
  ASSERT_EQ(run(logged({"--progress", "bar"})), 0) << err();
  EXPECT_THAT(out(), AllOf(Not(HasSubstr("\r")), Not(HasSubstr("\x1b")), HasSubstr(" held-out "),
                           HasSubstr(" lr "), HasSubstr(" norm "), HasSubstr(" tokens/s "),
                           HasSubstr("% of peak "), HasSubstr(" MiB ")));
}

TEST_F(TrainLogTest, FilesThatCannotBeWrittenEndTheRunAtItsStart) {
  const std::string below = file("text") + "/x";
  const auto expect = [&](const Words& words, const std::string& text) {
    EXPECT_NE(run(small(words)), 0) << text;
    EXPECT_THAT(err(), HasSubstr(text));
    EXPECT_THAT(out(), Not(HasSubstr("step ")));
  };
  for (const char* ranks : {"1", "2"}) {
    expect({"--csv", below, "--ranks", ranks}, "train: --csv: ");
    expect({"--tensorboard", below, "--ranks", ranks},
           "train: --tensorboard: cannot make the folder \"" + below + "\"");
    expect({"--curves", below + ".png", "--ranks", ranks}, "train: --curves: ");
  }
  expect({"--tensorboard", "/proc"}, "train: --tensorboard: ");
  std::filesystem::create_directory(folder_ / "folder.svg");
  expect({"--curves", file("folder.svg")},
         "train: --curves: cannot write " + file("folder.svg") + ": it is a folder");
}

// The run ends on all ranks, and the error names the file and the reason.
TEST_F(TrainLogTest, AFullDiskEndsTheRun) {
  const std::string disk = file("disk");
  std::filesystem::create_directory(disk);
  if (::mount("weft-test", disk.c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "a small file system cannot be mounted here (needs root)";
  for (const char* flag : {"--metrics", "--csv", "--tensorboard"}) {
    EXPECT_NE(run(small({flag, disk + "/log", "--steps", "100000", "--dim", "8", "--seq", "4", "--batch", "2",
                         "--ranks", "2", "--ffn", "8"})),
              0)
        << flag;
    EXPECT_THAT(err(),
                AllOf(HasSubstr(fmt::format("train: {}: ", flag)), HasSubstr("No space left on device")));
    std::filesystem::remove_all(disk + "/log");
  }
  EXPECT_EQ(run(small({"--curves", disk + "/l.png", "--until", "2"})), 1);
  EXPECT_THAT(err(), AllOf(HasSubstr("train: --curves: "), HasSubstr("No space left on device")));
  EXPECT_EQ(::umount(disk.c_str()), 0);
}

// Ctrl-C: the files are whole, and the curves are drawn.
TEST_F(TrainLogTest, ASignalLeavesWholeFiles) {
  ChildProcess process =
      start(logged({"--steps", "1000000", "--until", "-1", "--eval-every", "0", "--ranks", "2"}));
  for (const Deadline limit = Deadline::after(seconds(30)); !limit.passed();) {
    if (contents(folder_ / "m").find("\"step\":3") != std::string::npos) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  process.kill(SIGINT);
  const auto status = process.wait(seconds(30));
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->code, 128 + SIGINT) << err();
  EXPECT_EQ(err(), "");
  const auto lines = metrics("m");
  ASSERT_GE(lines.size(), 4u);
  EXPECT_EQ(table("c").size(), lines.size());
  EXPECT_EQ(events_in(folder_ / "tb")["train/loss"].size(), lines.size());
  EXPECT_THAT(contents(folder_ / "l.svg"), HasSubstr("stroke=\"#0072b2\""));
  EXPECT_THAT(out(), Not(HasSubstr("held-out loss"))) << "who interrupts waits for no evaluation";
}

}  // namespace
}  // namespace weft::test::train_log_test
