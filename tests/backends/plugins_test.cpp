// Loading transports: which are found, and the texts about those that cannot be used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "support/errors.hpp"
#include "support/temporary_folder.hpp"
#include "support/values.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::plugins_test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

const std::string kFolder = WEFT_TEST_PLUGINS;
std::string file(const std::string& name) { return kFolder + "/libweft_backend_" + name + ".so"; }

struct Plugins : testing::Test {
  Plugins() { ::setenv("WEFT_BACKEND_PATH", ("/nowhere::" + kFolder).c_str(), 1); }
  ~Plugins() override { ::unsetenv("WEFT_BACKEND_PATH"); }
  Context context;

  // The traits of a group of one rank.
  GroupInit alone() {
    return {.context = context,
            .store = make_local_store(),
            .token = "t",
            .name = "g",
            .rank = 0,
            .size = 1,
            .deadline = Deadline::after(std::chrono::seconds(20))};
  }

  void refused(const std::string& name, const std::string& what) {
    expect_error(ErrorCode::unsupported, file(name) + ": " + what, [&] { load_backend(context, name); });
  }
};

TEST_F(Plugins, ASoundOneMakesGroups) {
  Membership m;
  m.store = make_local_store();
  const ProcessGroup group = ProcessGroup::create(context, "sound", m);
  EXPECT_EQ(group.size(), 1);
  EXPECT_TRUE(backend_traits(context, "sound").has(Op::scatter));
}

TEST_F(Plugins, WhatIsWrongIsSaidWithTheFile) {
  refused("no_entry", "has no function weft_backend_plugin()");
  const std::string is = "; expected " + std::to_string(kBackendAbi) + ": ";
  refused("newer_major",
          "built for backend ABI " + std::to_string(kBackendAbi + 1) + is + "it needs a newer weft");
  refused("older_major",
          "built for backend ABI " + std::to_string(kBackendAbi - 1) + is + "build it again with this weft");
  refused("short", "built with 8 bytes of BackendPlugin; expected " + std::to_string(sizeof(BackendPlugin)) +
                       ": its compiler or its options differ");
  refused("packed", "built with 8 bytes of OpState; expected " + std::to_string(sizeof(OpState)) +
                        ": its compiler or its options differ");
  refused("renamed", "says its name is \"other\"; expected \"renamed\"");
  refused("empty", "has no function make");
  refused("blocked", "cannot be used here: the moon is full");
}

TEST_F(Plugins, WhatItsFunctionsThrowIsSaidWithTheFile) {
  refused("throws_entry", "weft_backend_plugin() threw: an exception of type int");
  refused("throws_obstacle", "obstacle() threw: no moon");
  EXPECT_TRUE(load_backend(context, "throws_traits"));
  expect_error(ErrorCode::unsupported,
               file("throws_traits") + ": traits() threw: an exception of type std::runtime_error",
               [&] { backend_traits(context, "throws_traits"); });
}

TEST_F(Plugins, WhatIsWrongWithItsGroupsIsSaid) {
  Membership m;
  m.store = make_local_store();
  const auto text = [&](const char* name) {
    return error_text([&] { ProcessGroup::create(context, name, m); });
  };
  EXPECT_EQ(
      text("makes_null"),
      "unsupported: group \"world\": the transport's factory (a plug-in's `make`) returned null [rank 0]");
  EXPECT_EQ(text("promises"),
            "unsupported: " + file("promises") +
                ": Traits::guarantees of the plug-in's traits() are not those of its Backend::traits()");
}

// As a transport over streams does, whose ranks are on several hosts.
TEST_F(Plugins, AGroupMayDetectFewerDeathsThanThePluginSaid) {
  Membership m;
  m.store = make_local_store();
  const ProcessGroup group = ProcessGroup::create(context, "blind", m);
  EXPECT_TRUE(backend_traits(context, "blind").guarantees.detects_death);
  EXPECT_FALSE(group.traits().guarantees.detects_death);
}

// A plug-in that was built when BackendPlugin ended before `obstacle`, and Backend before ask() and answer().
// weft neither reads nor calls these.
TEST_F(Plugins, OneOfAnOlderMinorIsLoaded) {
  Membership m;
  m.store = make_local_store();
  const ProcessGroup group = ProcessGroup::create(context, "older_minor", m);
  EXPECT_EQ(group.size(), 1);
  const std::unique_ptr<Backend> backend = load_backend(context, "older_minor")(alone());
  EXPECT_TRUE(backend->ask(OpState{}));
  backend->answer();
  EXPECT_EQ(backend->gone(), std::vector<int>{7});  // of that version, so it is called
  // Its traits are those of this weft's shm, but it knows none of the later operations.
  for (const Op op : {Op::scan, Op::exscan, Op::wait_message, Op::exchange}) {
    EXPECT_FALSE(backend->traits().has(op)) << name(op);
    EXPECT_FALSE(backend_traits(context, "older_minor").has(op)) << name(op);
  }
  EXPECT_TRUE(backend->traits().has(Op::recv));
  EXPECT_EQ(backend->probe(0, 0), std::nullopt);
}

// A plug-in that was built before boxes had indices. Its exchange, which would not see them, is not called.
TEST_F(Plugins, OneOfTheMinorBeforeIndicesHasNoExchangeOfItsOwn) {
  EXPECT_FALSE(load_backend(context, "minor_five")(alone())->traits().has(Op::exchange));
  EXPECT_FALSE(backend_traits(context, "minor_five").has(Op::exchange));
  EXPECT_TRUE(backend_traits(context, "minor_five").has(Op::wait_message));
}

// A plug-in that was built before there were scans: weft calls its functions, and composes scans over it.
TEST_F(Plugins, OneOfTheMinorBeforeScansIsLoaded) {
  const std::unique_ptr<Backend> backend = load_backend(context, "minor_one")(alone());
  EXPECT_FALSE(backend->ask(OpState{}));
  Membership m;
  m.store = make_local_store();
  ProcessGroup group = ProcessGroup::create(context, "minor_one", m);
  EXPECT_FALSE(group.traits().has(Op::scan) || group.traits().has(Op::exscan));
  const std::vector<float> in{3, 4};
  std::vector<float> out(2);
  group.scan(view(in), view(out)).wait();
  EXPECT_EQ(out, in);
  group.exscan(view(in), view(out), {.op = ReduceOp::prod}).wait();
  EXPECT_EQ(out, (std::vector<float>{1, 1}));
}

// This is also so for a plug-in that has the name of one of weft's own transports.
TEST_F(Plugins, OneOfAnOlderMinorMayHaveAKnownName) {
  const TemporaryFolder folder;
  ::setenv("WEFT_BACKEND_PATH", folder.path().c_str(), 1);
  std::filesystem::copy_file(file("older_gloo"), folder / "libweft_backend_gloo.so");
  const std::unique_ptr<Backend> backend = load_backend(context, "gloo")(alone());
  EXPECT_TRUE(backend->ask(OpState{}));
  backend->answer();
}

// A newer plug-in has more fields than this weft knows.
TEST_F(Plugins, OneOfANewerMinorIsLoaded) {
  Membership m;
  m.store = make_local_store();
  EXPECT_EQ(ProcessGroup::create(context, "newer_minor", m).size(), 1);
}

TEST_F(Plugins, AFileThatIsNoLibraryIsRefused) {
  const TemporaryFolder folder;
  ::setenv("WEFT_BACKEND_PATH", folder.path().c_str(), 1);
  const std::string garbage = folder / "libweft_backend_sound.so";
  std::ofstream(garbage) << "these are not the bytes of a library";
  try {
    load_backend(context, "sound");
    ADD_FAILURE() << "it was loaded";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::unsupported);
    EXPECT_THAT(e.what(), StartsWith(garbage + ": cannot be loaded: "));
    EXPECT_EQ(std::string(e.what()).find(garbage, 1), std::string::npos) << "said twice: " << e.what();
  }
  // The same Context loads the file that replaces the first one.
  std::filesystem::remove(garbage);
  std::filesystem::copy_file(file("sound"), garbage);
  EXPECT_TRUE(load_backend(context, "sound"));
}

// dlopen() would map it, and the process end with SIGBUS at the first page that is not there.
TEST_F(Plugins, AFileThatIsCutShortIsRefused) {
  const TemporaryFolder folder;
  ::setenv("WEFT_BACKEND_PATH", folder.path().c_str(), 1);
  const std::string cut = folder / "libweft_backend_sound.so";
  for (const int bytes : {1500, 100}) {  // of the latter, the headers of the segments are not there
    std::filesystem::copy_file(file("sound"), cut, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(cut, static_cast<std::uintmax_t>(bytes));
    expect_error(ErrorCode::unsupported,
                 cut + ": cannot be loaded: it is truncated: it has " + std::to_string(bytes) +
                     " bytes; its segments need more",
                 [&] { load_backend(context, "sound"); });
  }
}

// weft does not wait for a FIFO. Found by doctor, too.
TEST_F(Plugins, WhatIsNoRegularFileIsRefused) {
  const TemporaryFolder folder;
  ::setenv("WEFT_BACKEND_PATH", folder.path().c_str(), 1);
  ASSERT_EQ(::mkfifo((folder / "libweft_backend_fifo.so").c_str(), 0600), 0);
  std::filesystem::create_directory(folder / "libweft_backend_folder.so");
  std::filesystem::create_symlink("/nowhere", folder / "libweft_backend_link.so");
  const std::pair<std::string, std::string> expected[] = {
      {"fifo", "is not a regular file (it is a FIFO)"},
      {"folder", "is not a regular file (it is a folder)"},
      {"link", "cannot open it: No such file or directory"}};
  const std::vector<FoundBackend> found = find_backends(context);
  for (const auto& [name, why] : expected) {
    const std::string text =
        (folder / ("libweft_backend_" + name + ".so")).string() + ": cannot be loaded: " + why;
    expect_error(ErrorCode::unsupported, text, [&] { load_backend(context, name); });
    EXPECT_TRUE(std::any_of(found.begin(), found.end(), [&](const FoundBackend& b) {
      return b.name == name && b.problem == text;
    })) << name;
  }
}

TEST_F(Plugins, WhatIsNotThereIsSaidWithTheFolders) {
  const std::vector<std::string> folders = backend_folders();
  ASSERT_EQ(folders.size(), 4u);
  EXPECT_EQ(folders[0], "/nowhere");
  EXPECT_EQ(folders[1], kFolder);
  EXPECT_EQ(folders[3], folders[2] + "/weft");
  EXPECT_TRUE(std::filesystem::exists(folders[2] + "/libweft.so"));
  expect_error(
      ErrorCode::unsupported,
      "backend \"pigeon\" was not found: it is not built in (\"shm\" and \"auto\" are), and there is no "
      "libweft_backend_pigeon.so in " +
          folders[0] + ", " + folders[1] + ", " + folders[2] + ", " + folders[3],
      [&] { load_backend(context, "pigeon"); });
}

TEST_F(Plugins, NamesAreNoPaths) {
  for (const std::string name : {"../sound", "", "carrier pigeon"})
    expect_error(ErrorCode::bad_argument,
                 "backend \"" + name + "\" is no name; expected letters, digits, '-' and '_'",
                 [&] { load_backend(context, name); });
}

TEST_F(Plugins, AllAreListed) {
  std::map<std::string, FoundBackend> by_name;
  for (FoundBackend& b : find_backends(context)) {
    EXPECT_FALSE(by_name.count(b.name)) << b.name;
    by_name[b.name] = b;
  }
  EXPECT_EQ(by_name["shm"].path, "built in");
  EXPECT_EQ(by_name["shm"].problem, "");
  EXPECT_EQ(by_name["sound"].path, file("sound"));
  EXPECT_EQ(by_name["sound"].version, "test");
  EXPECT_EQ(by_name["sound"].problem, "");
  EXPECT_EQ(by_name["blocked"].problem, "the moon is full");
  EXPECT_EQ(by_name["throws_obstacle"].problem, file("throws_obstacle") + ": obstacle() threw: no moon");
  EXPECT_THAT(by_name["newer_major"].problem, HasSubstr("backend ABI " + std::to_string(kBackendAbi + 1)));
}

}  // namespace
}  // namespace weft::test::plugins_test
