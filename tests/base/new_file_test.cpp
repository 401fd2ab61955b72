#include "base/files/new_file.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"

namespace weft::new_file_test {
namespace {

namespace fs = std::filesystem;
using test::contents;
using test::error_text;

struct NewFiles : testing::Test {
  std::size_t files_there() const {
    std::size_t count = 0;
    for (auto entry = fs::directory_iterator(folder.path()); entry != fs::directory_iterator(); ++entry)
      ++count;
    return count;
  }
  const test::TemporaryFolder folder;
  const fs::path path = folder / "out.json";
};

TEST_F(NewFiles, AppearWhole) {
  {
    NewFile file(path);
    file.write("one ");
    EXPECT_FALSE(fs::exists(path));
    file.write("two");
    file.sync();
    file.publish();
    EXPECT_EQ(contents(path), "one two");
    file.write(" three");
    EXPECT_EQ(contents(path), "one two three");
  }
  EXPECT_EQ(files_there(), 1u);
  write_new_file(path, "again");
  EXPECT_EQ(contents(path), "again");
  EXPECT_EQ(files_there(), 1u);
}

TEST_F(NewFiles, OneThatIsDroppedLeavesNothing) {
  write_new_file(path, "before");
  { NewFile(path).write("after"); }
  EXPECT_EQ(contents(path), "before");
  EXPECT_EQ(files_there(), 1u);
}

TEST_F(NewFiles, HaveTheModeThatTheUmaskLeaves) {
  const mode_t before = ::umask(027);
  write_new_file(path, "");
  ::umask(before);
  EXPECT_EQ(fs::status(path).permissions(), fs::perms(0640));
}

TEST_F(NewFiles, TwoOfOneNameHaveFilesOfTheirOwn) {
  NewFile one(path), two(path);
  one.write("one");
  two.write("two");
  two.publish();
  one.publish();
  EXPECT_EQ(contents(path), "one");
}

TEST_F(NewFiles, ALinkInTheirPlaceIsReplacedAndNotFollowed) {
  const fs::path precious = folder / "precious";
  write_new_file(precious, "precious");
  fs::create_symlink(precious, path);
  write_new_file(path, "new");
  EXPECT_EQ(contents(precious), "precious");
  EXPECT_FALSE(fs::is_symlink(path));
  EXPECT_EQ(contents(path), "new");
}

// A FIFO without a reader would make the writer wait forever.
TEST_F(NewFiles, WhatIsNoRegularFileIsRefused) {
  ASSERT_EQ(::mkfifo(path.c_str(), 0666), 0);
  EXPECT_EQ(
      error_text([&] { NewFile file(path); }),
      "bad_argument: cannot write " + path.string() + ": it is a FIFO; expected a regular file or nothing");
  EXPECT_EQ(error_text([&] { NewFile file(folder.path()); }),
            "bad_argument: cannot write " + folder.path().string() +
                ": it is a folder; expected a regular file or nothing");
  EXPECT_EQ(
      error_text([&] { NewFile file("/dev/null"); }),
      "bad_argument: cannot write /dev/null: it is a character device; expected a regular file or nothing");
  // It came while the file was written.
  NewFile file(folder / "late");
  ASSERT_EQ(::mkfifo((folder / "late").c_str(), 0666), 0);
  EXPECT_EQ(error_text([&] { file.publish(); }), "bad_argument: cannot write " + (folder / "late").string() +
                                                     ": it is a FIFO; expected a regular file or nothing");
}

TEST_F(NewFiles, ErrorsNameTheFile) {
  const std::string missing = (folder / "none" / "out").string(),
                    text = error_text([&] { NewFile file(missing); });
  EXPECT_TRUE(text.starts_with("system: cannot create " + missing + ".tmp.")) << text;
  EXPECT_TRUE(text.ends_with(": No such file or directory")) << text;
}

TEST_F(NewFiles, AFullDiskIsAnErrorThatLeavesNothing) {
  write_new_file(path, "before");
  EXPECT_TRUE(test::run_in_child([&] {
                const rlimit most{4, 4};
                if (::setrlimit(RLIMIT_FSIZE, &most) != 0) return 1;
                const std::string text = error_text([&] { write_new_file(path, "longer than that"); });
                return text.starts_with("system: cannot write " + path.string() + ".tmp.") ? 0 : 2;
              }).ok());
  EXPECT_EQ(contents(path), "before");
  EXPECT_EQ(files_there(), 1u);
}

}  // namespace
}  // namespace weft::new_file_test
