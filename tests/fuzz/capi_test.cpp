// Random calls of weft.h without libFuzzer: one of each function, those that found faults, and random ones,
// the same on every run.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "capi/call.hpp"
#include "capi/program.hpp"

namespace {

std::atomic<std::int64_t> live{0};

}  // namespace

// Counts what is allocated, by libweft too.
void* operator new(std::size_t bytes) {
  void* const at = std::malloc(bytes > 0 ? bytes : 1);
  if (at == nullptr) throw std::bad_alloc();
  live.fetch_add(1, std::memory_order_relaxed);
  return at;
}
void operator delete(void* at) noexcept {
  if (at != nullptr) live.fetch_sub(1, std::memory_order_relaxed);
  std::free(at);
}
void operator delete(void* at, std::size_t) noexcept { operator delete(at); }

namespace weft::fuzz::capi_test {
namespace {

std::int64_t live_allocations() { return live.load(std::memory_order_relaxed); }

// If an input hangs, the report names the function.
void hangs(int) {
  for (const auto& in : capi::now_in) {
    const char* const function = in.load();
    if (function == nullptr) continue;
    (void)!::write(STDERR_FILENO, "fuzz: hangs in ", 15);
    (void)!::write(STDERR_FILENO, function, std::strlen(function));
    (void)!::write(STDERR_FILENO, "\n", 1);
  }
  std::abort();
}

void run(const std::string& input) {
  ::signal(SIGALRM, hangs);
  ::alarm(60);
  capi::run_program(input, live_allocations);
  ::alarm(0);
}

TEST(FuzzCalls, EachFunctionDoesWhatItShould) {
  for (const std::string& seed : capi::program_seeds()) run(seed);
  EXPECT_EQ(capi::never_good(), std::vector<std::string>());
}

TEST(FuzzCalls, WhatFoundFaults) {
  const std::filesystem::path folder = std::filesystem::path(WEFT_FUZZ_CORPUS) / "capi";
  std::vector<std::filesystem::path> files;
  std::error_code absent;
  for (const auto& entry : std::filesystem::directory_iterator(folder, absent)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    std::ifstream in(path, std::ios::binary);
    run({std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()});
  }
}

TEST(FuzzCalls, RandomPrograms) {
  const int programs = std::getenv("WEFT_TEST_FULL") != nullptr ? 3000 : 150;
  for (int i = 0; i < programs; ++i) {
    SCOPED_TRACE(i);
    run(capi::random_program(static_cast<std::uint64_t>(i), 24));
  }
}

}  // namespace
}  // namespace weft::fuzz::capi_test
