#include "host/dependents.hpp"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/error.hpp"
#include "weft/base/storage.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft::dependents_test {
namespace {

struct Ended {
  int signal = 0;
  std::string said;
};

// Ends a Context while the object that `make` returns still exists.
template <class Make>
Ended context_first(const Make& make) {
  const test::TemporaryFolder folder;
  const std::string file = folder / "stderr";
  const test::ProcessResult result = test::run_in_child([&] {
    if (std::freopen(file.c_str(), "w", stderr) == nullptr) return 1;
    auto context = std::make_optional<Context>();
    [[maybe_unused]] const auto made = make(*context);
    context.reset();
    return 0;
  });
  return {result.status.signal, test::contents(file)};
}

TEST(Dependents, AContextThatEndsBeforeItsMemoryIsTold) {
  for (const Memory memory : {Memory::shared, Memory::local}) {
    const Ended ended =
        context_first([&](Context& context) { return Storage::allocate(context, memory, 4096); });
    EXPECT_EQ(ended.signal, SIGABRT);
    EXPECT_EQ(ended.said,
              "weft: context: destroyed before 1 block of memory (tensors); expected the Context to exist "
              "longer than all objects that were made with it (in a class, declare the Context before its "
              "groups and tensors)\n");
  }
}

TEST(Dependents, AreNamed) {
  const Ended ended = context_first([&](Context& context) {
    struct Both {
      Dependents::Entry a, b;
    };
    return std::unique_ptr<Both>(new Both{{context, "group \"a\""}, {context, "group \"b\""}});
  });
  EXPECT_EQ(ended.signal, SIGABRT);
  EXPECT_TRUE(ended.said.starts_with("weft: context: destroyed before group \"a\", group \"b\"; expected"))
      << ended.said;
}

TEST(Dependents, ThatEndBeforeTheContextAreForgotten) {
  const Ended ended = context_first([](Context& context) {
    { const Dependents::Entry entry(context, "group \"a\""); }
    const Storage one = Storage::allocate(context, Memory::shared, 1), copy = one;
    return 0;
  });
  EXPECT_EQ(ended.signal, 0);
  EXPECT_EQ(ended.said, "");
}

// A device whose memory is full.
class FullDevice final : public DeviceRuntime {
 public:
  Device device() const noexcept override { return {DeviceKind::cuda, 0}; }
  void* allocate(std::size_t, Stream) override { throw Error(ErrorCode::system, "the device is full"); }
  void release(void*, std::size_t, Stream) noexcept override {}
  void copy(const void*, Device, void*, Device, const Rows&, Stream) override {}
  void fill(void*, unsigned char, const Rows&, Stream) override {}
  Stream make_stream() override { return device(); }
  void destroy_stream(Stream) noexcept override {}
  void depend(Stream, Stream) override {}
  void wait(Stream) override {}
};

TEST(Dependents, MemoryThatWasNotToBeHadIsNotCounted) {
  const Ended ended = context_first([](Context& context) {
    context.add_device(std::make_unique<FullDevice>());
    EXPECT_THROW(Storage::allocate(context, Memory::local, 64, Device{DeviceKind::cuda, 0}), Error);
    return 0;
  });
  EXPECT_EQ(ended.signal, 0) << ended.said;
}

// An attachment of the Context may own memory of it: the Context ends it first.
TEST(Dependents, MemoryOfTheContextsOwnObjectsIsNoneOfThem) {
  struct Pool {
    explicit Pool(Context&) {}
    Storage storage;
  };
  const Ended ended = context_first([](Context& context) {
    context.attached<Pool>().storage = Storage::allocate(context, Memory::local, 64);
    return 0;
  });
  EXPECT_EQ(ended.signal, 0) << ended.said;
}

}  // namespace
}  // namespace weft::dependents_test
