// Tests of files that a save cannot remove, rename or write: the error, and what the next load and the next
// save find.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>

#include "checkpoint/file_io.hpp"
#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/run_ranks.hpp"
#include "support/seccomp.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/reader.hpp"

namespace weft::left_overs_test {
namespace {

namespace fs = std::filesystem;
using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

void save(const fs::path& directory, std::int64_t step, float value, const SaveOptions& options = {}) {
  std::vector<float> w(5, value);
  save_checkpoint(directory, {}, step, std::vector<NamedView>{{"w", view(w)}}, {}, options);
}

// The value of the latest one, all of whose elements are the same.
float loaded(const fs::path& directory) {
  std::vector<float> w(5);
  load_checkpoint(directory, {}, std::vector<MutableNamedView>{{"w", view(w)}});
  EXPECT_EQ(w, std::vector<float>(5, w[0]));
  EXPECT_THAT(verify_checkpoint(directory), ::testing::IsEmpty());
  return w[0];
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  return names;
}

std::string warnings_of(const std::function<void()>& action) {
  ::testing::internal::CaptureStderr();
  action();
  return ::testing::internal::GetCapturedStderr();
}

// Even if the kernel refuses to remove files, everything is saved and named.
TEST(LeftOvers, WhatCannotBeRemovedIsAWarning) {
  const test::TemporaryFolder folder;
  save(folder.path(), 1, 1);
  const auto result = test::run_in_child([&] {
    test::forbid(SYS_unlinkat);
    test::forbid(SYS_rmdir);
    const std::string at = folder.path().string();
    const auto warning = [&](const std::string& what) {
      return HasSubstr("weft warning: [program] save_checkpoint: " + what);
    };
    const std::string no = " cannot be removed: Operation not permitted";
    EXPECT_THAT(warnings_of([&] { save(folder.path(), 2, 2, {.keep = 1}); }),
                warning("the older step " + at + "/step-00000001.unfinished" + no));
    EXPECT_EQ(loaded(folder.path()), 2);
    EXPECT_THAT(warnings_of([&] { save(folder.path(), 2, 3); }),
                ::testing::AllOf(warning("the left-over " + at + "/step-00000001.unfinished" + no),
                                 warning("the replaced " + at + "/step-00000002.unfinished" + no)));
    EXPECT_EQ(loaded(folder.path()), 3);
    // A left-over folder of the same step is in the way, and gets another name.
    EXPECT_THAT(warnings_of([&] { save(folder.path(), 2, 4); }),
                warning("the left-over " + at + "/step-00000002.unfinished" + no));
    EXPECT_EQ(loaded(folder.path()), 4);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
  save(folder.path(), 3, 5, {.keep = 1});
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("latest", "step-00000003"));
}

// For example, the folder of an old step is a mount point.
TEST(LeftOvers, AnOldStepThatKeepsItsNameStays) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may mount";
  const test::TemporaryFolder folder;
  save(folder.path(), 1, 1);
  save(folder.path(), 2, 2);
  const auto result = test::run_in_child([&] {
    const fs::path old = folder / "step-00000001";
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount(old.c_str(), old.c_str(), nullptr, MS_BIND, nullptr) != 0) {
      std::fprintf(stderr, "this root may not mount: not tried\n");
      return 0;
    }
    for (int step = 3; step < 5; ++step) {
      EXPECT_THAT(
          warnings_of([&] { save(folder.path(), step, static_cast<float>(step), {.keep = 1}); }),
          HasSubstr("the older step " + old.string() + " cannot be removed: Device or resource busy"));
      EXPECT_EQ(loaded(folder.path()), static_cast<float>(step));
    }
    EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("latest", "step-00000001", "step-00000004"));
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

// A save that fails reports how far it came, and the report is true.
TEST(LeftOvers, AFailureSaysWhatIsThere) {
  const test::TemporaryFolder folder;
  const std::string at = folder.path().string();
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    std::vector<float> w(2, 1);
    const std::vector<NamedView> views = {{"w", view(w), make_layout(mesh, {Shard{0}}, {4})}};
    save_checkpoint(folder.path(), mesh, 1, views);
    const auto text = [&](int step, const std::string& stage) {
      SaveOptions options;
      options.keep = 1;
      options.on_stage = [&](std::string_view reached) {
        if (rank.rank == 0 && reached == stage) throw Error(ErrorCode::system, "no more paper");
      };
      return error_text([&] { save_checkpoint(folder.path(), mesh, step, views, {}, options); });
    };
    const auto expected = [&](const std::string& state) {
      return std::string("system: save_checkpoint: ") + (rank.rank == 0 ? "" : "rank 0 failed: ") +
             "no more paper; " + state;
    };
    const std::string named = "/step-00000002 is whole, but " + at + "/latest does not name it";
    EXPECT_EQ(text(2, "folder"), expected(at + " is as it was"));
    EXPECT_EQ(text(2, "index"), expected(at + " is as it was"));
    EXPECT_EQ(text(2, "renamed"), expected(at + named));
    EXPECT_EQ(text(2, "latest written"), expected(at + named));
    EXPECT_EQ(text(3, "latest named"),
              expected(at + "/step-00000003 is whole, and " + at + "/latest names it"));
    EXPECT_EQ(text(3, "exchanged"), expected(at + "/step-00000003 is whole, and " + at + "/latest names it"));
    EXPECT_EQ(text(3, "old"), expected(at + "/step-00000003 is whole, and " + at + "/latest names it"));
    EXPECT_EQ(verify_checkpoint(folder.path()).size(), 0u);
  });
}

#if defined(SYS_rename) && !defined(WEFT_EMULATED)
// NFS, 9p and FUSE refuse to exchange two folders: the old one is renamed aside and the new one in.
TEST(WithoutExchange, AStepThatIsThereIsReplaced) {
  const test::TemporaryFolder folder;
  const auto result = test::run_in_child([&] {
    test::forbid(SYS_renameat2);
    for (int again = 0; again < 3; ++again) {
      save(folder.path(), 1, static_cast<float>(again));
      EXPECT_EQ(loaded(folder.path()), static_cast<float>(again));
    }
    EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("latest", "step-00000001"));
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

// Killed between the two renames. The old folder is found, by its step's path, too, and the next save gives
// it its name.
TEST(WithoutExchange, AKillLeavesTheOldOne) {
  const test::TemporaryFolder folder;
  save(folder.path(), 1, 1);
  const auto result = test::run_in_child([&] {
    test::forbid(SYS_renameat2);
    save(folder.path(), 1, 2, {.on_stage = [](std::string_view stage) {
           if (stage == "spared") ::kill(::getpid(), SIGKILL);
         }});
    return 0;
  });
  ASSERT_EQ(result.status.signal, SIGKILL) << test::to_string(result);
  EXPECT_THAT(names_in(folder.path()),
              UnorderedElementsAre("latest", "step-00000001.spare", "step-00000001.unfinished"));
  EXPECT_EQ(loaded(folder.path()), 1);
  EXPECT_EQ(loaded(folder / "step-00000001"), 1);
  EXPECT_EQ(latest_checkpoint(folder.path())->folder, folder / "step-00000001.spare");
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    std::vector<float> w(rank.rank == 0 ? 3 : 2);
    const std::vector<MutableNamedView> targets = {{"w", view(w), make_layout(mesh, {Shard{0}}, {5})}};
    for (const fs::path& from : {folder.path(), folder / "step-00000001", folder / "step-00000001" / ""}) {
      w.assign(w.size(), 0);
      EXPECT_EQ(load_checkpoint(from, mesh, targets).step, 1);
      EXPECT_EQ(w, std::vector<float>(w.size(), 1));
    }
  });
  save(folder.path(), 2, 3);
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("latest", "step-00000001", "step-00000002"));
  EXPECT_EQ(loaded(folder / "step-00000001"), 1);
}
#endif

// overlayfs does not rename a folder of its lower layer.
TEST(WithoutExchange, AFolderOfALowerLayerIsReplaced) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may mount";
  const test::TemporaryFolder folder;
  for (const char* name : {"lower", "tmpfs", "merged"}) fs::create_directory(folder / name);
  save(folder / "lower", 1, 1);
  save(folder / "lower", 2, 1);
  const auto result = test::run_in_child([&] {
    const fs::path upper = folder / "tmpfs" / "upper", work = folder / "tmpfs" / "work";
    bool mounted = ::unshare(CLONE_NEWNS) == 0 &&
                   ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                   ::mount("none", (folder / "tmpfs").c_str(), "tmpfs", 0, nullptr) == 0;
    if (mounted) {
      fs::create_directory(upper);
      fs::create_directory(work);
      const std::string layers = "lowerdir=" + (folder / "lower").string() + ",upperdir=" + upper.string() +
                                 ",workdir=" + work.string() + ",redirect_dir=off";
      mounted = ::mount("overlay", (folder / "merged").c_str(), "overlay", 0, layers.c_str()) == 0;
    }
    if (!mounted) {
      std::fprintf(stderr, "this root may not mount overlayfs: not tried\n");
      return 0;
    }
    EXPECT_EQ(loaded(folder / "merged"), 1);
    save(folder / "merged", 2, 2);
    EXPECT_EQ(loaded(folder / "merged"), 2);
    save(folder / "merged", 2, 3);
    EXPECT_EQ(loaded(folder / "merged"), 3);
    EXPECT_THAT(names_in(folder / "merged"),
                UnorderedElementsAre("latest", "step-00000001", "step-00000002"));
    EXPECT_EQ(warnings_of([&] { save(folder / "merged", 3, 4, {.keep = 1}); }), "");
    EXPECT_THAT(names_in(folder / "merged"), UnorderedElementsAre("latest", "step-00000003"));
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
  EXPECT_EQ(loaded(folder / "lower"), 1);
}

// A save always creates new files: it follows no existing link and opens no existing FIFO.
TEST(WrittenFiles, AreNewOnes) {
  const test::TemporaryFolder folder;
  const fs::path target = folder / "file", victim = folder / "victim";
  std::ofstream(victim) << "mine";
  fs::create_symlink(victim, target);
  fs::create_symlink(victim, folder / ("file.tmp." + std::to_string(::getpid())));
  const mode_t before = ::umask(027);
  {
    AtomicFile one(target), other(target);
    EXPECT_EQ(names_in(folder.path()).size(), 5u);
    one.write("one");
    one.commit();
    other.write("other");
    other.commit();
  }
  ::umask(before);
  EXPECT_EQ(names_in(folder.path()).size(), 3u);
  struct stat status {};
  ASSERT_EQ(::lstat(target.c_str(), &status), 0);
  EXPECT_TRUE(S_ISREG(status.st_mode));
  EXPECT_EQ(status.st_mode & 0777u, 0640u);
  std::string text;
  std::ifstream(victim) >> text;
  EXPECT_EQ(text, "mine");
  std::ifstream(target) >> text;
  EXPECT_EQ(text, "other");
}

TEST(WrittenFiles, AnotherUsersFolderIsAWarningOnce) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may give a folder away";
  const test::TemporaryFolder folder;
  ASSERT_EQ(::chown(folder.path().c_str(), 65534, 65534), 0);
  const std::string text = "weft warning: [program] save_checkpoint: " + folder.path().string() +
                           " belongs to user 65534, who may replace what is saved there\n";
  EXPECT_EQ(warnings_of([&] { save(folder.path(), 1, 1); }), text);
  EXPECT_EQ(warnings_of([&] { save(folder.path(), 2, 1); }), "");
}

// A folder of the name that a save makes is another user's link: it is removed, and not written to.
TEST(WrittenFiles, AnUnfinishedFolderIsNoLink) {
  const test::TemporaryFolder folder;
  fs::create_directory(folder / "run");
  fs::create_directory(folder / "victim");
  fs::create_directory_symlink(folder / "victim", folder / "run" / "step-00000001.unfinished");
  save(folder / "run", 1, 1);
  EXPECT_TRUE(fs::is_empty(folder / "victim"));
  EXPECT_EQ(loaded(folder / "run"), 1);
}

}  // namespace
}  // namespace weft::left_overs_test
