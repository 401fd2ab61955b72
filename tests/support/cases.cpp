#include "support/cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "base/text/plain_streams.hpp"

namespace weft::test {
namespace {

constexpr int kRanksMax = 8;

class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  std::vector<Case> read(const std::string& text) {
    TextIn lines(text);
    for (std::string line; std::getline(lines, line);) {
      ++line_;
      take(line);
    }
    finish();
    if (all_.empty()) wrong("no case; expected \"case NAME\"");
    return std::move(all_);
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const {
    throw std::runtime_error(fmt::format("{}:{}: {}", file_, line_, what));
  }

  void take(std::string line) {
    const auto comment = line.find('#');
    const bool error = line.find_first_not_of(" \t") == line.find("error");  // its text may have a '#'
    if (comment != std::string::npos && !error) line.erase(comment);
    TextIn words(line);
    std::string word;
    if (!(words >> word)) return;
    if (word == "case") return begin(words);
    if (all_.empty()) wrong(fmt::format("\"{}\" before the first case", word));
    if (word == "ranks") return take_ranks(words);
    if (now().ranks.empty()) wrong(fmt::format("\"{}\" before \"ranks N\"", word));
    const std::vector<CaseRank*> whose = ranks_of(words);
    std::string rest;
    std::getline(words, rest);
    take_field(word, whose, rest);
  }

  void begin(TextIn& words) {
    finish();
    std::string name, more;
    if (!(words >> name) || words >> more) wrong("expected \"case NAME\", where NAME is one word");
    if (!names_.insert(name).second) wrong(fmt::format("there are two cases \"{}\"", name));
    all_.push_back({fmt::format("{}:{}", file_, line_), name, {}});
  }

  void take_ranks(TextIn& words) {
    int n = 0;
    if (!(words >> n) || n < 1 || n > kRanksMax)
      wrong(fmt::format("expected \"ranks N\", where N is from 1 to {}", kRanksMax));
    if (!now().ranks.empty()) wrong("a second \"ranks\"");
    now().ranks.resize(static_cast<std::size_t>(n));
  }

  // "0:" or "0,2:" at the beginning means those ranks. Nothing means all.
  std::vector<CaseRank*> ranks_of(TextIn& words) {
    const auto before = words.tellg();
    std::vector<CaseRank*> whose;
    std::string word;
    if (words >> word && word.back() == ':' && word.find_first_not_of("0123456789,:") == std::string::npos) {
      word.back() = ',';
      TextIn numbers(word);
      for (std::string number; std::getline(numbers, number, ',');) {
        const auto r = static_cast<std::size_t>(integer(number, "rank"));
        if (r >= now().ranks.size())
          wrong(fmt::format("there is no rank {}; the case has {}", number, now().ranks.size()));
        whose.push_back(&now().ranks[r]);
      }
      return whose;
    }
    words.clear();
    words.seekg(before);
    for (CaseRank& r : now().ranks) whose.push_back(&r);
    return whose;
  }

  void take_field(const std::string& word, const std::vector<CaseRank*>& whose, const std::string& rest) {
    const auto each = [&](auto&& put) {
      for (CaseRank* const r : whose) put(*r);
    };
    if (word == "call") return each([&](CaseRank& r) { r.call = call(rest); });
    if (word == "in")
      return each([&](CaseRank& r) {
        r.has_in = true;
        r.in = numbers(rest);
      });
    if (word == "out")
      return each([&](CaseRank& r) {
        r.has_out = true;
        r.out = expected(rest);
      });
    if (word == "error") return each([&](CaseRank& r) { r.error = error(rest); });
    if (word == "in_counts") return each([&](CaseRank& r) { r.in_counts = integers(rest); });
    if (word == "out_counts") return each([&](CaseRank& r) { r.out_counts = integers(rest); });
    if (word == "in_offsets") return each([&](CaseRank& r) { r.in_offsets = integers(rest); });
    if (word == "out_offsets") return each([&](CaseRank& r) { r.out_offsets = integers(rest); });
    wrong(fmt::format(
        "\"{}\"; expected case, ranks, call, in, out, error, in_counts, out_counts, in_offsets or "
        "out_offsets",
        word));
  }

  // op dtype [reduction] [root R] [to R] [from R] [tag T] [canonical] [in_place]
  CaseCall call(const std::string& text) const {
    TextIn words(text);
    std::string word;
    CaseCall c;
    if (!(words >> word)) wrong("a call without an operation");
    c.op = one_of<Op>(word, kOpCount, "operation");
    if (c.op == Op::barrier) return c;
    if (!(words >> word)) wrong(fmt::format("{} without a dtype", name(c.op)));
    c.dtype = one_of<DType>(word, kDTypeCount, "dtype");
    while (words >> word) {
      if (word == "root" || word == "to" || word == "from" || word == "tag") {
        std::string number;
        words >> number;
        (word == "root" ? c.root : word == "tag" ? c.tag : c.peer) = static_cast<int>(integer(number, word));
      } else if (word == "canonical") {
        c.order = Order::canonical;
      } else if (word == "in_place") {
        c.in_place = true;
      } else {
        c.reduce.kind = one_of<ReduceOp::Kind>(word, kReduceKindCount, "reduction or option");
        if (c.reduce.kind == ReduceOp::Kind::user || c.reduce.kind == ReduceOp::Kind::premul_sum)
          wrong(fmt::format("a case cannot have the reduction {}", word));
      }
    }
    return c;
  }

  template <class Enum>
  Enum one_of(const std::string& word, int count, std::string_view what) const {
    for (int k = 0; k < count; ++k)
      if (name(static_cast<Enum>(k)) == word) return static_cast<Enum>(k);
    wrong(fmt::format("there is no {} \"{}\"", what, word));
  }

  std::int64_t integer(const std::string& word, std::string_view what) const {
    std::int64_t x = 0;
    const auto [end, fault] = std::from_chars(word.data(), word.data() + word.size(), x);
    if (fault != std::errc() || end != word.data() + word.size() || x < 0)
      wrong(fmt::format("{} is \"{}\"; expected an integer, 0 or more", what, word));
    return x;
  }

  std::vector<std::int64_t> integers(const std::string& text) const {
    TextIn words(text);
    std::vector<std::int64_t> all;
    for (std::string word; words >> word;) all.push_back(integer(word, "a count"));
    if (all.size() != all_.back().ranks.size())
      wrong(
          fmt::format("{} numbers; expected one for each of {} ranks", all.size(), all_.back().ranks.size()));
    return all;
  }

  // "3", "-0", "nan", "inf", or "5x7": seven times 5.
  template <class Put>
  void values(const std::string& text, const Put& put) const {
    TextIn words(text);
    for (std::string word; words >> word;) {
      const auto times = word.find('x');
      const std::string value = word.substr(0, times);
      const std::int64_t n = times == std::string::npos ? 1 : integer(word.substr(times + 1), "how often");
      char* end = nullptr;
      const double x = std::strtod(value.c_str(), &end);
      if (value != "?" && (end == value.c_str() || *end != '\0'))
        wrong(fmt::format("\"{}\" is no number", word));
      for (std::int64_t i = 0; i < n; ++i) put(value == "?" ? std::nullopt : std::optional(x));
    }
  }
  std::vector<std::optional<double>> expected(const std::string& text) const {
    std::vector<std::optional<double>> all;
    values(text, [&](std::optional<double> x) { all.push_back(x); });
    return all;
  }
  std::vector<double> numbers(const std::string& text) const {
    std::vector<double> all;
    values(text, [&](std::optional<double> x) {
      if (!x) wrong("\"?\" stands in out alone");
      all.push_back(*x);
    });
    return all;
  }

  std::string error(const std::string& text) const {
    const auto begin = text.find_first_not_of(" \t");
    if (begin == std::string::npos || text.find(": ") == std::string::npos)
      wrong("expected \"error CODE: TEXT\"");
    return text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
  }

  // The fields that a case must have, once it is whole.
  void finish() {
    if (all_.empty()) return;
    const Case& c = all_.back();
    if (c.ranks.empty()) wrong(fmt::format("case {} without \"ranks N\"", c.name));
    if (std::none_of(c.ranks.begin(), c.ranks.end(), [](const CaseRank& r) { return r.call.has_value(); }))
      wrong(fmt::format("case {} without a call", c.name));
  }

  Case& now() { return all_.back(); }

  const std::string file_;
  int line_ = 0;
  std::set<std::string> names_;
  std::vector<Case> all_;
};

}  // namespace

std::vector<Case> read_cases(const std::string& text, const std::string& file) {
  return Reader(file).read(text);
}

std::vector<Case> read_cases(const std::filesystem::path& file) {
  FileIn in(file, std::ios::binary);
  TextOut text;
  if (!(text << in.rdbuf()))
    throw std::runtime_error(fmt::format("{}: cannot be read, or is empty", file.string()));
  return read_cases(text.str(), file.filename().string());
}

}  // namespace weft::test
