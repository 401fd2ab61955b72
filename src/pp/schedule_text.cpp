// Schedules as text: see to_string(const PipelineSchedule&).
#include <fmt/format.h>

#include <array>
#include <optional>

#include "base/files/new_file.hpp"
#include "base/files/regular_file.hpp"
#include "base/parse_number.hpp"
#include "pp/schedule_table.hpp"
#include "weft/base/error.hpp"
#include "weft/pp/schedule.hpp"

namespace weft {
namespace {

constexpr std::array<std::string_view, pp::kKinds> kActionNames{"F",      "B",      "I",      "W",
                                                                "SEND_F", "RECV_F", "SEND_B", "RECV_B"};

// "1RECV_F2"
std::optional<PipelineAction> action_of(std::string_view word) {
  constexpr std::string_view kDigits = "0123456789";
  const std::size_t begin = word.find_first_not_of(kDigits), last = word.find_last_not_of(kDigits);
  if (begin == std::string_view::npos) return std::nullopt;
  const auto stage = parse_integer<int>(word.substr(0, begin)),
             micro_batch = parse_integer<int>(word.substr(last + 1));
  const std::string_view kind = word.substr(begin, last + 1 - begin);
  for (std::size_t i = 0; i < kActionNames.size(); ++i)
    if (kind == kActionNames[i] && stage && micro_batch)
      return PipelineAction{static_cast<pp::Kind>(i), *stage, *micro_batch};
  return std::nullopt;
}

// The words of a line, without its comment.
std::vector<std::string_view> words_of(std::string_view line) {
  constexpr std::string_view kBlank = " \t\r";
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> words;
  for (std::size_t begin = line.find_first_not_of(kBlank); begin != std::string_view::npos;) {
    const std::size_t end = std::min(line.find_first_of(kBlank, begin), line.size());
    words.push_back(line.substr(begin, end - begin));
    begin = line.find_first_not_of(kBlank, end);
  }
  return words;
}

class ScheduleReader {
 public:
  void read(std::string_view line) {
    ++number_;
    const std::vector<std::string_view> words = words_of(line);
    if (words.empty()) return;
    const std::string_view key = words[0];
    const std::span<const std::string_view> values = std::span(words).subspan(1);
    if (key == "schedule")
      once(s_.name.empty(), key), s_.name = one(key, values);
    else if (key == "ranks")
      once(s_.ranks == 0, key), set_ranks(integer(key, one(key, values)));
    else if (key == "micro-batches")
      once(s_.micro_batches == 0, key), s_.micro_batches = integer(key, one(key, values));
    else if (key == "stages" || key == "memory") {
      std::vector<int>& list = key == "stages" ? s_.rank_of_stage : s_.memory;
      once(list.empty(), key);
      for (const std::string_view v : values) list.push_back(integer(key, v));
    } else if (key.ends_with(':')) {
      actions(key.substr(0, key.size() - 1), values);
    } else {
      wrong(fmt::format(
          "\"{}\"; expected schedule, ranks, micro-batches, stages, memory, or the number of a rank and ':'",
          key));
    }
  }
  PipelineSchedule take() {
    if (s_.ranks == 0) throw Error(ErrorCode::bad_argument, "schedule: there is no line \"ranks N\"");
    return std::move(s_);
  }

 private:
  static constexpr int kMost = 1 << 20;
  [[noreturn]] void wrong(const std::string& text) const {
    throw Error(ErrorCode::bad_argument, fmt::format("schedule: line {}: {}", number_, text));
  }
  void once(bool first, std::string_view key) const {
    if (!first) wrong(fmt::format("\"{}\" is there twice", key));
  }
  std::string one(std::string_view key, std::span<const std::string_view> values) const {
    if (values.size() != 1) wrong(fmt::format("\"{}\" has {} values; expected 1", key, values.size()));
    return std::string(values[0]);
  }
  int integer(std::string_view key, std::string_view word) const {
    const auto value = parse_integer<int>(word);
    if (!value || *value < 0 || *value > kMost)
      wrong(fmt::format("\"{}\": \"{}\"; expected a number from 0 to {}", key, word, kMost));
    return *value;
  }
  void set_ranks(int ranks) {
    if (ranks < 1 || ranks > 4096) wrong(fmt::format("ranks {}; expected 1 to 4096", ranks));
    s_.ranks = ranks;
    s_.actions.resize(static_cast<std::size_t>(ranks));
  }
  void actions(std::string_view rank_text, std::span<const std::string_view> words) {
    const auto rank = parse_integer<int>(rank_text);
    if (!rank || *rank < 0 || *rank >= s_.ranks)
      wrong(fmt::format("\"{}:\"; expected a rank from 0 to {}, after \"ranks N\"", rank_text, s_.ranks - 1));
    std::vector<PipelineAction>& list = s_.actions[static_cast<std::size_t>(*rank)];
    for (const std::string_view word : words) {
      const std::optional<PipelineAction> a = action_of(word);
      if (!a) wrong(fmt::format("\"{}\"; expected an action like 0F3, 1RECV_F2 or 2B0", word));
      list.push_back(*a);
    }
  }
  PipelineSchedule s_;
  int number_ = 0;
};

std::string subject_of(const std::filesystem::path& file) {
  return fmt::format("schedule {}:", file.string());
}

}  // namespace

std::string to_string(const PipelineAction& a) {
  return fmt::format("{}{}{}", a.stage, kActionNames[static_cast<std::size_t>(a.kind)], a.micro_batch);
}

std::string to_string(const PipelineSchedule& s) {
  std::string text = s.name.empty() ? std::string() : fmt::format("schedule {}\n", s.name);
  text += fmt::format("ranks {}\nmicro-batches {}\nstages", s.ranks, s.micro_batches);
  for (const int rank : s.rank_of_stage) text += fmt::format(" {}", rank);
  text += "\nmemory";
  for (const int count : s.memory) text += fmt::format(" {}", count);
  for (std::size_t rank = 0; rank < s.actions.size(); ++rank) {
    text += fmt::format("\n{}:", rank);
    for (const PipelineAction& a : s.actions[rank]) text += fmt::format(" {}", to_string(a));
  }
  return text + "\n";
}

PipelineSchedule parse_pipeline_schedule(std::string_view text) {
  ScheduleReader reader;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    reader.read(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return reader.take();
}

PipelineSchedule read_pipeline_schedule(const std::filesystem::path& file) {
  const std::string text = read_regular_file(file.string(), subject_of(file), std::size_t{256} << 20);
  try {
    PipelineSchedule s = parse_pipeline_schedule(text);
    check_pipeline_schedule(s);
    return s;
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{} {}", subject_of(file), e.what()));
  }
}

void write_pipeline_schedule(const PipelineSchedule& schedule, const std::filesystem::path& file) {
  check_pipeline_schedule(schedule);
  write_new_file(file, to_string(schedule), subject_of(file) + " ");
}

}  // namespace weft
