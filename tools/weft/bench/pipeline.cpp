#include "pipeline.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "competitors.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {

int bench_pipeline(const Options& o) {
  if (!o.against.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("bench: --against \"{}\"; expected none: pipeline is ours alone",
                            fmt::join(o.against, ",")));
  if (!o.json.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("bench: --json \"{}\"; expected none for pipeline", o.json));
  std::vector<std::string> words{program(o, "pipeline_bench"), "--ranks", std::to_string(o.ranks)};
  if (!o.sizes.empty()) words.insert(words.end(), {"--bytes", std::to_string(o.bytes.back())});
  if (!o.plot.empty()) words.insert(words.end(), {"--plot", o.plot});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::fflush(nullptr);
  ::execv(argv[0], argv.data());
  throw_errno(fmt::format("bench: {}", words[0]), errno);
}

}  // namespace weft::bench
