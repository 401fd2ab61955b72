// A C++ program whose callbacks throw: weft.h converts their exceptions to errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

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
    // A callback that is called at once, and that throws an object which is no exception of the library.
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

// A transport in C++: streams of bytes in memory. One function, which the test chooses, throws on rank 0.
class Pipes {
 public:
  std::string throwing;  // "open", "write", "read", "close", or "write a number"
  std::atomic<int> closed{0};

  weft_transport transport() {
    weft_transport t = WEFT_TRANSPORT_INIT;
    t.name = "pipes";
    t.transport_data = this;
    t.open = [](void* data, const weft_channel_init* init, void** channel, weft_error*) -> weft_status {
      auto& pipes = *static_cast<Pipes*>(data);
      pipes.may_throw("open", init->rank);
      *channel = new Channel{pipes, init->token, init->rank};
      return WEFT_OK;
    };
    t.write = [](void* channel, std::int32_t to, const void* bytes, std::size_t count, std::size_t* taken,
                 weft_error*) -> weft_status {
      auto& c = *static_cast<Channel*>(channel);
      c.pipes.may_throw("write", c.rank);
      if (c.rank == 0 && c.pipes.throwing == "write a number") throw 7;
      const std::lock_guard lock(c.pipes.mutex_);
      const auto* const from = static_cast<const char*>(bytes);
      auto& stream = c.pipes.streams_[{c.token, c.rank, to}];
      stream.insert(stream.end(), from, from + count);
      *taken = count;
      return WEFT_OK;
    };
    t.read = [](void* channel, std::int32_t from, void* bytes, std::size_t count, std::size_t* got,
                weft_error*) -> weft_status {
      auto& c = *static_cast<Channel*>(channel);
      c.pipes.may_throw("read", c.rank);
      const std::lock_guard lock(c.pipes.mutex_);
      auto& stream = c.pipes.streams_[{c.token, from, c.rank}];
      *got = std::min(count, stream.size());
      const auto end = stream.begin() + static_cast<std::ptrdiff_t>(*got);
      std::copy(stream.begin(), end, static_cast<char*>(bytes));
      stream.erase(stream.begin(), end);
      return WEFT_OK;
    };
    t.close = [](void* channel) {
      auto* const c = static_cast<Channel*>(channel);
      Pipes& pipes = c->pipes;
      const int rank = c->rank;
      delete c;
      ++pipes.closed;
      pipes.may_throw("close", rank);
    };
    return t;
  }

 private:
  struct Channel {
    Pipes& pipes;
    std::string token;
    int rank;
  };
  void may_throw(const char* what, int rank) const {
    if (rank == 0 && throwing == what) throw std::runtime_error("no wire");
  }
  std::mutex mutex_;
  std::map<std::tuple<std::string, int, int>, std::deque<char>> streams_;  // by token, source and destination
};

class Transports : public Callbacks {
 protected:
  weft_status join(int rank, weft_group** group, weft_error* error) {
    const weft_transport t = pipes_.transport();
    weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
    options.deadline_ns = 20 * kSeconds;
    return weft_group_create_over(context_, &t, store_, rank, 2, &options, group, error);
  }
  template <class Body>
  void both_over(const Body& body) {
    const auto rank = [&](int r) {
      weft_group* group = nullptr;
      weft_error error = WEFT_ERROR_INIT;
      ASSERT_EQ(join(r, &group, &error), WEFT_OK) << error.text;
      body(r, group);
      weft_group_destroy(group);
    };
    std::thread other([&] { rank(1); });
    rank(0);
    other.join();
  }
  Pipes pipes_;
};

TEST_F(Transports, CarryCallsWhereNothingThrows) {
  both_over([](int rank, weft_group* group) {
    double x[3000] = {static_cast<double>(rank + 1)};
    const weft_buffer b = {x, 3000, WEFT_F64, WEFT_CPU};
    ASSERT_EQ(weft_all_reduce(group, &b, &b, nullptr, nullptr, nullptr), WEFT_OK);
    EXPECT_EQ(x[0], 3);
  });
  EXPECT_EQ(pipes_.closed, 2);
}

// All ranks get the text of the rank whose function threw.
TEST_F(Transports, WhatTheirFunctionsThrowFailsTheGroupWithItsText) {
  const std::pair<const char*, const char*> cases[] = {
      {"write", "transport pipes: write to rank 1 on rank 0: it threw: no wire"},
      {"read", "transport pipes: read from rank 1 on rank 0: it threw: no wire"},
      {"write a number", "transport pipes: write to rank 1 on rank 0: it threw: an exception of type int"}};
  for (const auto& [where, text] : cases) {
    const std::string expected = text;
    pipes_.throwing = "";
    std::atomic<int> there{0};
    both_over([&](int rank, weft_group* group) {
      ++there;
      while (there < 2) std::this_thread::yield();
      if (rank == 0) pipes_.throwing = where;
      double x[10] = {0};
      const weft_buffer b = {x, 10, WEFT_F64, WEFT_CPU};
      weft_error error = WEFT_ERROR_INIT;
      EXPECT_EQ(weft_all_reduce(group, &b, &b, nullptr, nullptr, &error), WEFT_SYSTEM);
      EXPECT_THAT(error.text, HasSubstr(expected));
      EXPECT_EQ(error.rank_count, 1);
      EXPECT_EQ(error.ranks[0], 0);
      EXPECT_EQ(weft_barrier(group, nullptr, nullptr, nullptr), WEFT_SYSTEM);
    });
  }
}

TEST_F(Transports, WhatOpenThrowsIsTheErrorOfMakingTheGroup) {
  pipes_.throwing = "open";
  const auto rank = [&](int r) {
    weft_group* group = nullptr;
    weft_error error = WEFT_ERROR_INIT;
    EXPECT_EQ(join(r, &group, &error), WEFT_SYSTEM);
    EXPECT_THAT(error.text, HasSubstr("transport pipes: open on rank 0: it threw: no wire"));
    EXPECT_EQ(group, nullptr);
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
  EXPECT_EQ(pipes_.closed, 1) << "rank 1's end";
}

TEST_F(Transports, WhatCloseThrowsGoesNoFurther) {
  pipes_.throwing = "close";
  both_over(
      [](int, weft_group* group) { EXPECT_EQ(weft_barrier(group, nullptr, nullptr, nullptr), WEFT_OK); });
  EXPECT_EQ(pipes_.closed, 2);
}

TEST_F(Transports, AReductionThatThrowsFailsTheCallAndAbortsTheGroup) {
  both_over([](int rank, weft_group* group) {
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
    const weft_status status = weft_all_reduce(group, &b, &b, &options, nullptr, &error);
    EXPECT_TRUE(status == WEFT_SYSTEM || status == WEFT_ABORTED)
        << error.text;  // each rank calls its function
    EXPECT_THAT(error.text, HasSubstr("the function of reduction \"mine\" threw: no such sum"));
    weft_reduction_destroy(reduction);
  });
}

// An allocator in C++ that throws: the operation that needs memory for what it stages fails with the text.
TEST_F(Transports, WhatAnAllocatorThrowsIsTheErrorOfTheCall) {
  struct Pool {
    std::atomic<bool> open{true};
    std::atomic<int> blocks{0};
  } pool;
  weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
  options.allocator.data = &pool;
  options.allocator.allocate = [](void* data, std::size_t bytes, std::size_t alignment) -> void* {
    auto& p = *static_cast<Pool*>(data);
    if (!p.open) throw std::runtime_error("no memory today");
    ++p.blocks;
    return std::aligned_alloc(alignment, bytes);
  };
  options.allocator.deallocate = [](void* data, void* memory, std::size_t, std::size_t) {
    --static_cast<Pool*>(data)->blocks;
    std::free(memory);
  };
  weft_context_destroy(context_);
  ASSERT_EQ(weft_context_create(&options, &context_, nullptr), WEFT_OK);
  std::atomic<int> there{0};
  both_over([&](int rank, weft_group* group) {
    double x[100] = {static_cast<double>(rank)};
    const weft_buffer b = {x, 100, WEFT_F64, WEFT_CPU};
    ASSERT_EQ(weft_all_reduce(group, &b, &b, nullptr, nullptr, nullptr), WEFT_OK);
    ++there;
    while (there < 2) std::this_thread::yield();
    pool.open = false;
    weft_error error = WEFT_ERROR_INIT;
    EXPECT_EQ(weft_all_reduce(group, &b, &b, nullptr, nullptr, &error), WEFT_SYSTEM);
    EXPECT_THAT(error.text,
                HasSubstr("bytes of local memory cannot be allocated: the host's allocator, asked for "));
    EXPECT_THAT(error.text, HasSubstr(" bytes aligned to 64, threw: no memory today"));
  });
  weft_context_destroy(context_);
  context_ = nullptr;
  EXPECT_EQ(pool.blocks, 0);
}

// Callbacks for a tensor of a checkpoint, for the progress of reading, and for a name.
TEST(Checkpoints, WhatACallbackThrowsIsTheErrorOfTheCall) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.path().string(), file = folder + "/all.safetensors";
  float x[2] = {1, 2};
  const weft_tensor tensor = {"x", {x, 2, WEFT_F32, WEFT_CPU}, nullptr, nullptr, 0};
  ASSERT_EQ(weft_checkpoint_save(folder.c_str(), nullptr, 1, &tensor, 1, nullptr, 0, nullptr, nullptr),
            WEFT_OK);
  weft_error error = WEFT_ERROR_INIT;
  weft_checkpoint_save_options save = WEFT_CHECKPOINT_SAVE_OPTIONS_INIT;
  save.on_stage = [](void*, const char* stage) {
    if (stage == std::string("index")) throw std::runtime_error("not now");
  };
  EXPECT_EQ(weft_checkpoint_save(folder.c_str(), nullptr, 2, &tensor, 1, nullptr, 0, &save, &error),
            WEFT_SYSTEM);
  EXPECT_STREQ(error.text, "weft_checkpoint_save: options->on_stage threw: not now");
  std::int64_t step = 0;
  weft_text* latest = nullptr;
  EXPECT_EQ(weft_checkpoint_latest(folder.c_str(), &latest, &step, nullptr), WEFT_OK);
  EXPECT_EQ(step, 1) << "the checkpoint before it";
  weft_text_destroy(latest);
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

  const std::string other = folder + "/other";
  weft_checkpoint_convert_options convert = WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT;
  convert.rename = names.rename;
  EXPECT_EQ(weft_checkpoint_convert(folder.c_str(), other.c_str(), &convert, nullptr, &error), WEFT_SYSTEM);
  EXPECT_STREQ(error.text, "weft_checkpoint_convert: options->rename threw: no name");
  convert.rename = nullptr;
  convert.dtype = [](void*, const char*, weft_dtype) -> weft_dtype { throw 7; };
  EXPECT_EQ(weft_checkpoint_convert(folder.c_str(), other.c_str(), &convert, nullptr, &error), WEFT_SYSTEM);
  EXPECT_STREQ(error.text, "weft_checkpoint_convert: options->dtype threw: an exception of type int");
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
