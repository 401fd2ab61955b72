// A host in C++ whose callbacks throw: weft.h turns what they throw into errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>

#if __has_include(<dlpack/dlpack.h>)  // before weft.h: the types that both declare are the same
#include <dlpack/dlpack.h>
#endif
#include "support/temporary_folder.hpp"
#include "weft/weft.h"

namespace weft::test::callbacks_test {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kSeconds = 1'000'000'000;

// Two threads as ranks of one group.
class Callbacks : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(weft_context_create(nullptr, &context_, nullptr), WEFT_OK);
    ASSERT_EQ(weft_store_create_local(&store_, nullptr), WEFT_OK);
  }
  void TearDown() override {
    weft_store_destroy(store_);
    weft_context_destroy(context_);
  }
  template <class Body>
  void both(const Body& body) {
    const auto rank = [&](int r) {
      weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
      options.deadline_ns = 20 * kSeconds;
      weft_group* group = nullptr;
      ASSERT_EQ(weft_group_create(context_, store_, r, 2, &options, &group, nullptr), WEFT_OK);
      body(r, group);
      weft_group_destroy(group);
    };
    std::thread other([&] { rank(1); });
    rank(0);
    other.join();
  }
  weft_context* context_ = nullptr;
  weft_store* store_ = nullptr;
};

TEST_F(Callbacks, WhatACompletionCallbackThrowsIsTheErrorOfTheWork) {
  both([](int, weft_group* group) {
    weft_work* work = nullptr;
    weft_error error = WEFT_ERROR_INIT;
    ASSERT_EQ(weft_barrier(group, nullptr, &work, nullptr), WEFT_OK);
    const auto throws = [](void*, const weft_error*) { throw std::runtime_error("not today"); };
    const weft_status begun = weft_work_then(work, throws, nullptr, &error);
    if (begun == WEFT_OK) {
      EXPECT_EQ(weft_work_wait(work, &error), WEFT_SYSTEM);
      EXPECT_STREQ(error.text, "weft_work_then: the callback threw: not today");
      EXPECT_EQ(weft_work_wait(work, nullptr), WEFT_SYSTEM);
    }
    EXPECT_STREQ(error.text, "weft_work_then: the callback threw: not today");
    weft_work_destroy(work);
    // At once, and what is no exception of the library.
    ASSERT_EQ(weft_barrier(group, nullptr, &work, nullptr), WEFT_OK);
    ASSERT_EQ(weft_work_wait(work, nullptr), WEFT_OK);
    EXPECT_EQ(weft_work_then(
                  work, [](void*, const weft_error*) { throw 7; }, nullptr, &error),
              WEFT_SYSTEM);
    EXPECT_STREQ(error.text, "weft_work_then: the callback threw: an exception of type int");
    weft_work_destroy(work);
    EXPECT_EQ(weft_barrier(group, nullptr, nullptr, nullptr), WEFT_OK);  // the group goes on
  });
}

TEST_F(Callbacks, AReductionThatThrowsFailsTheCallAndAbortsTheGroup) {
  both([](int rank, weft_group* group) {
    weft_reduction* reduction = nullptr;
    const auto throws = [](void*, const void*, const void*, void*, std::int64_t, weft_dtype) {
      throw std::runtime_error("no such sum");
    };
    ASSERT_EQ(weft_reduction_create("mine", throws, nullptr, nullptr, &reduction, nullptr), WEFT_OK);
    weft_call_options options = WEFT_CALL_OPTIONS_INIT;
    options.reduce_op = WEFT_USER;
    options.reduction = reduction;
    double x[2000] = {static_cast<double>(rank)};
    const weft_buffer b = {x, 2000, WEFT_F64, WEFT_CPU};
    weft_error error = WEFT_ERROR_INIT;
    weft_work* work = nullptr;
    ASSERT_EQ(weft_all_reduce(group, &b, &b, &options, &work, nullptr), WEFT_OK);
    const weft_status status = weft_work_wait(work, &error);
    // The rank that did not call its function may have the result already.
    if (status == WEFT_OK) {
      EXPECT_EQ(weft_barrier(group, nullptr, nullptr, &error), WEFT_ABORTED);
    } else {
      EXPECT_TRUE(status == WEFT_SYSTEM || status == WEFT_ABORTED) << error.text;
      EXPECT_EQ(weft_work_wait(work, nullptr), status);
    }
    EXPECT_THAT(error.text, HasSubstr("the function of reduction \"mine\" threw: no such sum"));
    weft_work_destroy(work);
    if (status == WEFT_SYSTEM) {  // of no use any more, in any group
      weft_error again = WEFT_ERROR_INIT;
      EXPECT_EQ(weft_all_reduce(group, &b, &b, &options, nullptr, &again), WEFT_SYSTEM);
      EXPECT_STREQ(again.text, "weft_all_reduce: the function of reduction \"mine\" threw: no such sum");
    }
    weft_reduction_destroy(reduction);
  });
}

// Asked about a tensor of a checkpoint, told of bytes that were read, asked for a name.
TEST(Checkpoints, WhatACallbackThrowsIsTheErrorOfTheCall) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.path().string(), file = folder + "/all.safetensors";
  float x[2] = {1, 2};
  const weft_tensor tensor = {"x", {x, 2, WEFT_F32, WEFT_CPU}, nullptr, nullptr, 0};
  ASSERT_EQ(weft_checkpoint_save(folder.c_str(), nullptr, 1, &tensor, 1, nullptr, 0, nullptr, nullptr),
            WEFT_OK);
  weft_error error = WEFT_ERROR_INIT;
  weft_checkpoint_load_options load = WEFT_CHECKPOINT_LOAD_OPTIONS_INIT;
  load.may_leave = [](void*, const char*) -> bool { throw std::runtime_error("not today"); };
  EXPECT_EQ(weft_checkpoint_load(folder.c_str(), nullptr, nullptr, 0, &load, nullptr, nullptr, &error),
            WEFT_SYSTEM);
  EXPECT_STREQ(error.text, "weft_checkpoint_load: options->may_leave threw: not today");
  weft_text* faults = nullptr;
  const auto progress = [](void*, std::int64_t, std::int64_t) { throw 7; };
  EXPECT_EQ(weft_checkpoint_verify(folder.c_str(), progress, nullptr, &faults, &error), WEFT_SYSTEM);
  EXPECT_STREQ(error.text, "weft_checkpoint_verify: progress threw: an exception of type int");
  EXPECT_EQ(faults, nullptr);
  weft_checkpoint_export_options names = WEFT_CHECKPOINT_EXPORT_OPTIONS_INIT;
  names.rename = [](void*, const char*) -> const char* { throw std::runtime_error("no name"); };
  EXPECT_EQ(weft_checkpoint_export(folder.c_str(), file.c_str(), &names, nullptr, &error), WEFT_SYSTEM);
  EXPECT_STREQ(error.text, "weft_checkpoint_export: options->rename threw: no name");
  EXPECT_FALSE(std::filesystem::exists(file));
}

#if __has_include(<dlpack/dlpack.h>)
TEST(Dlpack, ItsTypesAreHandedInWithoutACast) {
  float x = 3;
  DLManagedTensor managed{};
  managed.dl_tensor.data = &x;
  managed.dl_tensor.device = {kDLCPU, 0};
  managed.dl_tensor.dtype = {kDLFloat, 32, 1};
  weft_buffer b{};
  EXPECT_EQ(weft_buffer_from_dlpack(&managed, &b, nullptr), WEFT_OK);
  EXPECT_EQ(b.data, &x);
  EXPECT_EQ(weft_buffer_from_dltensor(&managed.dl_tensor, &b, nullptr), WEFT_OK);
  EXPECT_EQ(b.count, 1);
}
#endif

}  // namespace
}  // namespace weft::test::callbacks_test
