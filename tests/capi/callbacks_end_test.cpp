// weft_callbacks_end: afterwards weft calls no function of the program, and none is running.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "support/temporary_folder.hpp"
#include "weft/weft.h"

namespace weft::test::callbacks_end_test {
namespace {

constexpr std::int64_t kSeconds = 1'000'000'000;

class CallbacksEnd : public ::testing::Test {
 protected:
  void SetUp() override {
    weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
    options.log = [](void* data, weft_log_level, const char*) { ++*static_cast<std::atomic<int>*>(data); };
    options.log_data = &logged_;
    ASSERT_EQ(weft_context_create(&options, &context_, nullptr), WEFT_OK);
    ASSERT_EQ(weft_group_create(context_, nullptr, 0, 1, nullptr, &group_, nullptr), WEFT_OK);
  }
  void TearDown() override {
    EXPECT_EQ(weft_callbacks_begin(nullptr), WEFT_OK);
    weft_group_destroy(group_);
    weft_context_destroy(context_);
  }
  // The arguments of a callback of a Work that has ended.
  static void run(void* data, const weft_error*) { (*static_cast<std::function<void()>*>(data))(); }
  weft_status then(std::function<void()>& function) {
    weft_work* work = nullptr;
    EXPECT_EQ(weft_barrier(group_, nullptr, &work, nullptr), WEFT_OK);
    const weft_status status = weft_work_then(work, run, &function, nullptr);
    EXPECT_EQ(weft_work_wait(work, nullptr), WEFT_OK);
    weft_work_destroy(work);
    return status;
  }
  std::atomic<int> logged_{0};
  weft_context* context_ = nullptr;
  weft_group* group_ = nullptr;
};

TEST_F(CallbacksEnd, LeavesOutWhatNeedsNoAnswer) {
  int calls = 0;
  std::function<void()> count = [&] { ++calls; };
  EXPECT_EQ(then(count), WEFT_OK);
  EXPECT_EQ(calls, 1);
  ASSERT_EQ(weft_callbacks_end(0, nullptr), WEFT_OK);
  ASSERT_EQ(weft_callbacks_end(0, nullptr), WEFT_OK);
  EXPECT_EQ(then(count), WEFT_OK);
  EXPECT_EQ(calls, 1);
  const test::TemporaryFolder folder;
  weft_checkpoint_save_options options = WEFT_CHECKPOINT_SAVE_OPTIONS_INIT;
  options.on_stage = [](void* data, const char*) { ++*static_cast<int*>(data); };
  options.data = &calls;
  const std::string to = folder.path().string();
  EXPECT_EQ(weft_checkpoint_save(to.c_str(), nullptr, 1, nullptr, 0, nullptr, 0, &options, nullptr), WEFT_OK);
  weft_checkpoint_saver* saver = nullptr;
  ASSERT_EQ(weft_checkpoint_saver_create(nullptr, false, &saver, nullptr), WEFT_OK);
  EXPECT_EQ(
      weft_checkpoint_saver_save(saver, to.c_str(), 2, nullptr, 0, nullptr, 0, &options, nullptr, nullptr),
      WEFT_OK);
  EXPECT_EQ(weft_checkpoint_saver_wait(saver, nullptr), WEFT_OK);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(weft_callbacks_begin(nullptr), WEFT_OK);
  EXPECT_EQ(then(count), WEFT_OK);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(
      weft_checkpoint_saver_save(saver, to.c_str(), 3, nullptr, 0, nullptr, 0, &options, nullptr, nullptr),
      WEFT_OK);
  EXPECT_EQ(weft_checkpoint_saver_wait(saver, nullptr), WEFT_OK);
  EXPECT_GT(calls, 2);
  weft_checkpoint_saver_destroy(saver);
}

TEST_F(CallbacksEnd, FailsWhatNeedsAnAnswer) {
  ASSERT_EQ(weft_callbacks_end(0, nullptr), WEFT_OK);
  const test::TemporaryFolder folder;
  const std::string to = folder.path().string();
  ASSERT_EQ(weft_checkpoint_save(to.c_str(), nullptr, 1, nullptr, 0, nullptr, 0, nullptr, nullptr), WEFT_OK);
  weft_error error = WEFT_ERROR_INIT;
  weft_text* faults = nullptr;
  const auto progress = [](void*, std::int64_t, std::int64_t) {};
  const float one = 1;
  std::int64_t extent = 1;
  weft_tensor tensor{};
  tensor.name = "w";
  tensor.data = {const_cast<float*>(&one), 1, WEFT_F32, WEFT_CPU};
  tensor.extents = &extent;
  tensor.dim_count = 1;
  EXPECT_EQ(weft_checkpoint_save(to.c_str(), nullptr, 2, &tensor, 1, nullptr, 0, nullptr, nullptr), WEFT_OK);
  EXPECT_EQ(weft_checkpoint_verify(to.c_str(), progress, nullptr, &faults, &error), WEFT_SYSTEM);
  EXPECT_NE(std::string(error.text).find("progress threw: weft no longer calls functions of the program"),
            std::string::npos)
      << error.text;
}

TEST_F(CallbacksEnd, WaitsForWhatIsRunning) {
  std::atomic<bool> entered{false}, goes_on{false};
  std::function<void()> blocks = [&] {
    entered = true;
    while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  std::thread other([&] { then(blocks); });
  while (!entered) std::this_thread::yield();
  weft_error error = WEFT_ERROR_INIT;
  EXPECT_EQ(weft_callbacks_end(kSeconds / 100, &error), WEFT_TIMEOUT);
  EXPECT_STREQ(error.text, "weft_callbacks_end: 1 functions of the program's are still running after 0.01 s");
  std::atomic<bool> ended{false};
  std::thread ends([&] {
    EXPECT_EQ(weft_callbacks_end(60 * kSeconds, nullptr), WEFT_OK);
    EXPECT_TRUE(goes_on);
    ended = true;
  });
  goes_on = true;
  ends.join();
  EXPECT_TRUE(ended);
  other.join();
}

TEST_F(CallbacksEnd, IsNotForTheCallbackThatCallsIt) {
  weft_status status = WEFT_SYSTEM;
  std::function<void()> ends = [&] { status = weft_callbacks_end(60 * kSeconds, nullptr); };
  EXPECT_EQ(then(ends), WEFT_OK);
  EXPECT_EQ(status, WEFT_OK);
}

TEST_F(CallbacksEnd, RefusesANegativeLimit) {
  weft_error error = WEFT_ERROR_INIT;
  EXPECT_EQ(weft_callbacks_end(-1, &error), WEFT_BAD_ARGUMENT);
  EXPECT_STREQ(error.text, "weft_callbacks_end: limit_ns is -1; expected 0 or more");
  int calls = 0;
  std::function<void()> count = [&] { ++calls; };
  EXPECT_EQ(then(count), WEFT_OK);
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace weft::test::callbacks_end_test
