#include "program.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "inputs.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

void take_flags(int& argc, char** argv, const std::vector<Flag>& flags) {
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const auto flag =
        std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return f.name == argv[i]; });
    if (flag == flags.end()) {
      argv[kept++] = argv[i];
    } else if (!flag->has_value) {
      flag->take("");
    } else if (i + 1 < argc) {
      flag->take(argv[++i]);
    } else {
      throw Error(ErrorCode::bad_argument,
                  "bench: " + flag->name + " is the last word; expected its value behind it");
    }
  }
  argc = kept;
  argv[argc] = nullptr;
}

}  // namespace

Flag rounds_flag(int& rounds) {
  return {"--rounds", [&rounds](const std::string& value) { rounds = rounds_from(value); }};
}

Flag tokens_flag(std::vector<std::int64_t>& tokens) {
  return {"--tokens", [&tokens](const std::string& value) {
            tokens.clear();
            for (const std::string& w : chosen("--tokens", value, {"8", "32", "128", "512", "2048", "8192"}))
              tokens.push_back(std::stol(w));
          }};
}

Flag words_flag(std::string name, std::vector<std::string>& words, std::vector<std::string> known) {
  return {name, [name, &words, all = std::move(known)](const std::string& value) {
            words = chosen(name, value, all);
          }};
}

int program_main(int argc, char** argv, const std::vector<Flag>& flags,
                 const std::function<std::vector<TableRow>(RankOfBench&)>& table,
                 const std::function<std::string(const Spec&)>& settings) {
  try {
    take_flags(argc, argv, flags);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 2;
  }
  return bench_main(argc, argv, {{Kind::all_reduce}}, table, settings);
}

}  // namespace weft::bench
