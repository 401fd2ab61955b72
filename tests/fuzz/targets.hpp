// Readers of foreign bytes, as functions of bytes: run by libFuzzer (main.cpp, one program each) and, over
// seeds and corpus, by an ordinary test (corpus_test.cpp). A target must return for every input, in bounded
// time and memory; its own checks abort.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft::fuzz {

struct Target {
  const char* name;
  void (*run)(std::string_view bytes);
  /// Real frames, files and texts to begin with.
  std::vector<std::string> (*seeds)();
};

/// store_server, store_client, store_file, texts, infos and, where they are built, tokens, tokenizer,
/// safetensors, index and latest.
const std::vector<Target>& targets();

}  // namespace weft::fuzz
