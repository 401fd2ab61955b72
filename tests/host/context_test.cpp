#include "weft/host/context.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "host/arena.hpp"
#include "support/errors.hpp"
#include "support/processes.hpp"
#include "weft/base/tensor.hpp"

namespace weft::context_test {
namespace {

TEST(Context, TellsAForkedChildWhatToDo) {
  Context context;
  EXPECT_FALSE(context.forked());
  EXPECT_NO_THROW(context.check_fork("storage"));
  const auto result = test::run_in_child([&] {
    EXPECT_TRUE(context.forked());
    const std::string tail =
        ": this process was forked from process " + std::to_string(::getppid()) +
        " after its Context was made; make a new Context in the child, or fork before the first one";
    EXPECT_EQ(test::error_text([&] { context.check_fork("all_reduce"); }), "unsupported: all_reduce" + tail);
    EXPECT_EQ(test::error_text([&] { Storage::allocate(context, Memory::local, 8); }),
              "unsupported: storage" + tail);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

// A child destroys objects of its parent: it must neither hang, nor crash, nor take anything from the
// parent.
TEST(Context, AForkedChildMayDestroyWhatItInherited) {
  auto context = std::make_unique<Context>();
  auto tensors = std::make_unique<std::vector<Tensor>>();
  for (const Memory m : {Memory::local, Memory::shared})
    for (const std::int64_t n : {10, 1'000'000})
      tensors->push_back(Tensor::zeros(*context, {n}, DType::f32, m));
  const auto result = test::run_in_child([&] {
    tensors.reset();
    context.reset();
#ifndef __SANITIZE_THREAD__  // which does not let a child of a threaded process start threads
    Context fresh;
    EXPECT_FALSE(fresh.forked());
    Tensor::zeros(fresh, {1000}, DType::f32, Memory::shared);
#endif
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
  EXPECT_EQ(arena_of(*context).counters().in_use_bytes, 4096u + 4'001'792u);
  for (const Tensor& t : *tensors)
    for (const float f : t.f32()) ASSERT_EQ(f, 0.0f);
  tensors.reset();
  EXPECT_EQ(arena_of(*context).counters().in_use_bytes, 0u);
}

TEST(Context, LogLevelComesFromTheEnvironment) {
  ::setenv("WEFT_LOG", "debug", 1);
  EXPECT_TRUE(Context().log().enabled(LogLevel::debug));
  ::setenv("WEFT_LOG", "error", 1);
  EXPECT_FALSE(Context({.log_level = LogLevel::info}).log().enabled(LogLevel::info));
  ::setenv("WEFT_LOG", "garbage", 1);
  EXPECT_EQ(test::error_text([] { Context(); }),
            "bad_argument: WEFT_LOG is \"garbage\"; expected error, warning, info or debug, and for single "
            "layers layer=level, as in info,store=debug");
  ::unsetenv("WEFT_LOG");
  EXPECT_TRUE(Context({.log_level = LogLevel::info}).log().enabled(LogLevel::info));
  EXPECT_EQ(test::error_text([] { Context({.segment_bytes = 0}); }),
            "bad_argument: context: segment_bytes is 0; expected at least 1");
}

// The program's levels of single layers, which the environment overrides.
TEST(Context, LayersHaveLogLevelsOfTheirOwn) {
  ContextOptions options{.log_level = LogLevel::info};
  options.log_levels = "store=debug,dp=error";
  const auto enabled = [&](LogLayer layer, LogLevel level) {
    return Context(options).log().enabled(layer, level);
  };
  EXPECT_TRUE(enabled(LogLayer::store, LogLevel::debug));
  EXPECT_FALSE(enabled(LogLayer::dp, LogLevel::warning));
  EXPECT_TRUE(enabled(LogLayer::group, LogLevel::info));
  ::setenv("WEFT_LOG", "group=error,dp=warning", 1);
  EXPECT_TRUE(enabled(LogLayer::store, LogLevel::debug));
  EXPECT_TRUE(enabled(LogLayer::dp, LogLevel::warning));
  EXPECT_FALSE(enabled(LogLayer::group, LogLevel::warning));
  ::setenv("WEFT_LOG", "warning", 1);
  EXPECT_FALSE(enabled(LogLayer::store, LogLevel::info));
  ::setenv("WEFT_LOG", "info,nccl=debug", 1);
  EXPECT_EQ(
      test::error_text([&] { Context{options}; }),
      "bad_argument: WEFT_LOG is \"info,nccl=debug\"; \"nccl\" is no layer; expected program, host, store, "
      "backends, group or dp");
  ::unsetenv("WEFT_LOG");
  options.log_levels = "store=loud";
  EXPECT_EQ(
      test::error_text([&] { Context{options}; }),
      "bad_argument: context: log_levels is \"store=loud\"; \"loud\" is no level; expected error, warning, "
      "info or debug, and for single layers layer=level, as in info,store=debug");
}

std::vector<std::string> events;

struct Pool {
  explicit Pool(Context&) { events.push_back("pool made"); }
  ~Pool() { events.push_back("pool gone"); }
};

struct Registry {
  explicit Registry(Context& c) : pool(c.attached<Pool>()) { events.push_back("registry made"); }
  ~Registry() { events.push_back("registry gone"); }
  Pool& pool;
};

TEST(Context, LayersAttachOneObjectEach) {
  {
    Context context;
    std::vector<std::thread> threads;
    std::vector<Registry*> seen(4);
    for (auto& s : seen) threads.emplace_back([&] { s = &context.attached<Registry>(); });
    for (std::thread& t : threads) t.join();
    for (Registry* r : seen) EXPECT_EQ(r, seen[0]);
    EXPECT_EQ(&seen[0]->pool, &context.attached<Pool>());
  }
  EXPECT_EQ(events, (std::vector<std::string>{"pool made", "registry made", "registry gone", "pool gone"}));
}

TEST(Context, LeavesNoDescriptorBehind) {
  const int before = test::count_descriptors();
  for (int i = 0; i < 3; ++i) {
    Context context;
    Storage::allocate(context, Memory::shared, 100);
  }
  EXPECT_EQ(test::count_descriptors(), before);
}

// In a separate process, since a process reads the variable once.
TEST(ContextDeath, RefusesAWrongInstructionSet) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ::setenv("WEFT_CPU_ISA", "avx1024", 1);
  const auto make = [] {
    std::fputs(test::error_text([] { Context context; }).c_str(), stderr);
    std::_Exit(0);
  };
  EXPECT_EXIT(make(), testing::ExitedWithCode(0),
              "bad_argument: WEFT_CPU_ISA is \"avx1024\"; expected avx2, avx512, avx512_bf16 or amx");
  ::unsetenv("WEFT_CPU_ISA");
}

// Runs this program again with a misspelt variable, in a process of its own, since only the first Context of
// a process warns.
TEST(UnknownVariables, AreWarnedOfOnce) {
  if (std::getenv("WEFT_SINGLE_COPPY") != nullptr) {
    const Context first, second;
    return;
  }
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command =
      "WEFT_SINGLE_COPPY=off '" + self + "' --gtest_filter=UnknownVariables.AreWarnedOfOnce 2>&1 >/dev/null";
  FILE* const said = ::popen(command.c_str(), "r");
  ASSERT_NE(said, nullptr);
  std::string text;
  for (int c; (c = std::fgetc(said)) != EOF;) text += static_cast<char>(c);
  EXPECT_EQ(::pclose(said), 0);
  EXPECT_EQ(text,
            "weft warning: [host] the environment has WEFT_SINGLE_COPPY, which weft does not know (is "
            "WEFT_SINGLE_COPY meant?); see docs/environment.md\n");
}

}  // namespace
}  // namespace weft::context_test
