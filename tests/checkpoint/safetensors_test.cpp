// The safetensors reader and writer: round trips, the golden files, and every way in which a file can be
// unsound.
#include "weft/checkpoint/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>

#include "support/errors.hpp"
#include "support/golden.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"

namespace weft::safetensors_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// A file as the format wants it: length, header, data of zeros.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + std::string(data_bytes, '\0');
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  return names;
}

class Safetensors : public ::testing::Test {
 protected:
  // The text that opening a file of these bytes gives, after a check that it names the file.
  std::string refusal(const std::string& bytes) {
    const auto path = folder_ / "bad.safetensors";
    std::ofstream(path, std::ios::binary) << bytes;
    const Error e = test::error_of([&] { SafetensorsFile::open(path); });
    const std::string text = e.what();
    const bool is_new = text.find("; known are ") != text.npos || text.find(" are supported") != text.npos;
    EXPECT_EQ(e.code(), is_new ? ErrorCode::unsupported : ErrorCode::corrupt) << text;
    const std::string prefix = "safetensors: " + path.string() + ": ";
    EXPECT_THAT(text, StartsWith(prefix));
    return text.substr(std::min(prefix.size(), text.size()));
  }
  std::string refusal_of_tensor(const std::string& entry, std::size_t data_bytes = 8) {
    return refusal(file_of(R"({"w":)" + entry + "}", data_bytes));
  }

  test::TemporaryFolder folder_;
  Context context_;
};

TEST_F(Safetensors, GivesBackEveryDTypeAndShape) {
  const auto path = folder_ / "all.safetensors";
  std::vector<Tensor> tensors;
  std::vector<SafetensorsEntry> entries;
  const std::vector<Shape> shapes = {Shape{},        Shape{0},       Shape{7},
                                     Shape{3, 0, 2}, Shape{2, 3, 5}, Shape{1, 2, 1, 2, 1, 2, 1, 2}};
  for (int d = 0; d < kDTypeCount; ++d)
    for (std::size_t s = 0; s < shapes.size(); ++s) {
      Tensor t(context_, shapes[s], static_cast<DType>(d));
      for (std::int64_t i = 0; i < t.bytes(); ++i)
        t.data()[i] =
            std::byte(t.dtype() == DType::boolean ? i % 2 : (i * 31 + d * 7 + static_cast<int>(s)) % 251);
      tensors.push_back(t);
      entries.push_back({std::string(name(t.dtype())) + "." + std::to_string(s), t});
    }
  write_safetensors(path, entries, {{"title", "caf\u00e9 \"quoted\"\n"}, {"step", "12"}});

  const auto file = SafetensorsFile::open(path);
  EXPECT_EQ(file.path(), path);
  ASSERT_EQ(file.names().size(), entries.size());
  EXPECT_TRUE(std::is_sorted(file.names().begin(), file.names().end()));
  EXPECT_EQ(file.metadata("title"), "caf\u00e9 \"quoted\"\n");
  EXPECT_EQ(file.metadata().size(), 2u);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Tensor t = file.read(context_, entries[i].name);
    EXPECT_EQ(t.dtype(), tensors[i].dtype());
    EXPECT_EQ(t.shape(), tensors[i].shape()) << entries[i].name;
    EXPECT_EQ(std::memcmp(t.data(), tensors[i].data(), static_cast<std::size_t>(t.bytes())), 0)
        << entries[i].name;
    EXPECT_EQ(file.info(entries[i].name).begin % size_bytes(t.dtype()), 0) << entries[i].name;
  }
  EXPECT_THAT(names_in(folder_.path()), ElementsAre("all.safetensors"));
}

TEST_F(Safetensors, DataBeginsAtAMultipleOf64AndListsAreSorted) {
  const std::vector<float> b = {1, 2};
  const std::vector<std::int8_t> a = {3};
  const std::vector<SafetensorsEntry> entries = {{"b", view(b)}, {"a", view(a)}};
  write_safetensors(folder_ / "two.safetensors", entries);
  const auto file = SafetensorsFile::open(folder_ / "two.safetensors");
  EXPECT_THAT(file.names(), ElementsAre("a", "b"));
  EXPECT_EQ(file.info("b").begin % 64, 0);
  EXPECT_EQ(file.info("a").begin,
            file.info("b").begin + 8);  // after the larger elements, so that nothing needs a gap
  EXPECT_THAT(file.metadata(), IsEmpty());
}

TEST_F(Safetensors, ReadsPartsOfATensor) {
  std::vector<std::int32_t> values(10);
  std::iota(values.begin(), values.end(), 100);
  const std::vector<SafetensorsEntry> entries = {{"w", view(values)}};
  write_safetensors(folder_ / "w.safetensors", entries);
  const auto file = SafetensorsFile::open(folder_ / "w.safetensors");
  std::vector<std::int32_t> part(3);
  file.read_bytes("w", 16, std::as_writable_bytes(std::span(part)));
  EXPECT_THAT(part, ElementsAre(104, 105, 106));
  file.read_bytes("w", 40, {});
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument,
                               [&] { file.read_bytes("w", 32, std::as_writable_bytes(std::span(part))); }),
              HasSubstr("tensor \"w\" has 40 bytes; 12 from byte 32 were requested"));
}

TEST_F(Safetensors, AnEmptyFileOfTensorsIsSound) {
  write_safetensors(folder_ / "none.safetensors", {});
  EXPECT_THAT(SafetensorsFile::open(folder_ / "none.safetensors").names(), IsEmpty());
}

TEST_F(Safetensors, ReadsEveryGoldenFile) {
  const auto files = test::golden_files("");
  if (files.empty()) GTEST_SKIP() << "no golden files in " << test::golden_dir();
  for (const auto& path : files) {
    const auto file = SafetensorsFile::open(path);
    EXPECT_THAT(file.names(), ::testing::Not(IsEmpty())) << path;
    EXPECT_THAT(file.metadata("case"), StartsWith("{")) << path;
    for (const std::string& name : file.names()) {
      const Tensor t = file.read(context_, name);
      EXPECT_EQ(t.bytes(), file.info(name).bytes) << path << " " << name;
      if (t.dtype() != DType::f32) continue;
      for (const float x : t.f32()) ASSERT_EQ(x, x) << path << " " << name << " has a NaN";
    }
    // The file that the writer makes of the same tensors reads back the same.
    std::vector<Tensor> tensors;
    std::vector<SafetensorsEntry> entries;
    for (const std::string& name : file.names()) {
      tensors.push_back(file.read(context_, name));
      entries.push_back({name, tensors.back()});
    }
    write_safetensors(folder_ / "copy.safetensors", entries, {{"case", file.metadata("case")}});
    const auto copy = SafetensorsFile::open(folder_ / "copy.safetensors");
    ASSERT_EQ(copy.names(), file.names());
    EXPECT_EQ(copy.metadata("case"), file.metadata("case"));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor t = copy.read(context_, entries[i].name);
      ASSERT_EQ(t.shape(), tensors[i].shape());
      EXPECT_EQ(std::memcmp(t.data(), tensors[i].data(), static_cast<std::size_t>(t.bytes())), 0)
          << entries[i].name;
    }
  }
}

TEST_F(Safetensors, RefusesAWrongFrame) {
  EXPECT_EQ(refusal("1234567"), "has 7 bytes; expected at least 8, the length of the header");
  EXPECT_EQ(refusal(std::string(8, '\xff')),
            "says its header has 18446744073709551615 bytes; at most 100000000 are allowed");
  EXPECT_EQ(refusal(file_of("{}", 0).substr(0, 9)),
            "says its header has 2 bytes; 1 are left (file 9 - length 8)");
  EXPECT_EQ(refusal(file_of("{\"w\":", 0)), "the header is no JSON (byte 6 of its 5)");
  EXPECT_EQ(refusal(file_of(R"({"w":1e999})", 0)),
            "the header has a number that is too large for JSON's readers");
  EXPECT_EQ(refusal(file_of("[]", 0)), "the header is a JSON array; expected an object");
  const std::string w = R"("w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  EXPECT_EQ(refusal(file_of("{" + w + "," + w + "}", 4)), "the header has the key \"w\" twice");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":3})", 0)),
            "__metadata__ is a JSON number; expected an object");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{"k":3}})", 0)),
            "__metadata__ has a JSON number under \"k\"; expected a string");
  std::filesystem::create_directory(folder_ / "d");
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument, [&] { SafetensorsFile::open(folder_ / "d"); }),
              HasSubstr("/d: is not a regular file"));
  EXPECT_THAT(test::error_text(ErrorCode::system, [&] { SafetensorsFile::open(folder_ / "absent"); }),
              ::testing::AllOf(HasSubstr("cannot open"), HasSubstr("/absent: No such file or directory")));
}

// Depth, time and kind of file are bounded, whatever a header says.
TEST_F(Safetensors, RefusesADeepHeader) {
  EXPECT_EQ(refusal(file_of(std::string(100'000, '['), 0)), "the header nests deeper than 32 levels");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","data_offsets":[0,8],"shape":)" + std::string(100'000, '[')),
            "the header nests deeper than 32 levels");
  std::string zeros = "[0";
  for (int i = 0; i < 10'000'000; ++i) zeros += ",0";
  EXPECT_EQ(refusal(file_of(zeros + "]", 0)), "the header has more than 10000000 values");
}

TEST_F(Safetensors, ManyTensorsAreReadInTime) {
  constexpr int kTensors = 80'000;
  std::string header = "{";
  for (int i = 0; i < kTensors; ++i)
    header += fmt::format(R"("{}":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}},)", i, i, i + 1);
  header.back() = '}';
  std::ofstream(folder_ / "many", std::ios::binary) << file_of(header, kTensors);
  const auto began = Clock::now();
  EXPECT_EQ(SafetensorsFile::open(folder_ / "many").names().size(), std::size_t{kTensors});
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));  // some 0.2 s; 100 s once
}

TEST_F(Safetensors, WaitsForNoFifo) {
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument, [&] { SafetensorsFile::open(folder_ / "fifo"); }),
            "safetensors: " + (folder_ / "fifo").string() + ": is not a regular file (it is a FIFO)");
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument, [] { SafetensorsFile::open("/dev/zero"); }),
            "safetensors: /dev/zero: is not a regular file (it is a character device)");
}

TEST_F(Safetensors, NulEndsNoName) {
  EXPECT_EQ(refusal(file_of(R"({"w\u0000x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1)),
            "the name of a tensor, \"w\", continues after a NUL");
  EXPECT_THAT(
      test::error_text(ErrorCode::system,
                       [&] { SafetensorsFile::open((folder_ / "w").string() + std::string("\0x", 2)); }),
      HasSubstr("cannot open"));
}

TEST_F(Safetensors, RefusesAWrongTensor) {
  EXPECT_EQ(refusal_of_tensor("3"), "tensor \"w\" is a JSON number; expected an object");
  EXPECT_EQ(refusal_of_tensor(R"({"shape":[2],"data_offsets":[0,8]})"),
            "tensor \"w\" has no string \"dtype\"");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F8_E8M0","shape":[8],"data_offsets":[0,8]})"),
            "tensor \"w\" has dtype F8_E8M0; known are F64 F32 F16 BF16 I8 I16 I32 I64 U8 U16 U32 U64 BOOL "
            "F8_E4M3 F8_E5M2 C64 C128");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","data_offsets":[0,8]})"),
            "tensor \"w\" has no list \"shape\"");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"),
            "tensor \"w\" has -2 in \"shape\"; expected integers from 0 to 2^63 - 1");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"),
            "tensor \"w\" has 2.0 in \"shape\"; expected integers from 0 to 2^63 - 1");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]})"),
            "tensor \"w\" has 9 dimensions; at most 8 are supported");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"),
            "tensor \"w\" has 1 data_offsets; expected 2, begin and end");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"),
            "tensor \"w\" begins at 8 and ends before, at 0");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"),
            "tensor \"w\" has 4 bytes (data_offsets 0 to 4); expected 8 (shape (2) of F32)");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]})"),
            "tensor \"w\" has shape (4611686018427387904, 4) of F32; a product beyond 2^63 - 1 bytes");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]})", 0),
            "tensor \"w\" has shape (0, 4611686018427387904, 4) of F32; a product beyond 2^63 - 1 bytes");
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[1e300],"data_offsets":[0,8]})"),
            "tensor \"w\" has 1e+300 in \"shape\"; expected integers from 0 to 2^63 - 1");
}

TEST_F(Safetensors, RefusesWrongOffsets) {
  // A truncated file is one whose last tensor reaches past its end.
  EXPECT_EQ(refusal_of_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 7),
            "tensor \"w\" ends at byte 8 of the data; the file has 7 (file 69 - header 62)");
  const auto two = [&](const std::string& b_offsets, std::size_t bytes) {
    return refusal(file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                           R"("b":{"dtype":"U8","shape":[8],"data_offsets":)" +
                               b_offsets + "}}",
                           bytes));
  };
  EXPECT_EQ(two("[7,15]", 15), "tensors \"a\" and \"b\" overlap at byte 7 of the data");
  EXPECT_EQ(two("[9,17]", 17), "bytes 8 to 9 of the data, before \"b\", belong to no tensor");
  EXPECT_EQ(two("[8,16]", 19), "the last 3 bytes belong to no tensor (file 133 - header 114 - tensors 16)");
}

TEST_F(Safetensors, AFileThatShrinksAfterOpenIsAnError) {
  const std::vector<float> values(64, 1.0F);
  const std::vector<SafetensorsEntry> entries = {{"w", view(values)}};
  const auto path = folder_ / "w.safetensors";
  write_safetensors(path, entries);
  const auto file = SafetensorsFile::open(path);
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(file.info("w").begin) + 6);
  EXPECT_THAT(test::error_text(ErrorCode::corrupt, [&] { file.read(context_, "w"); }),
              ::testing::AllOf(HasSubstr(path.string()), HasSubstr("it ends at byte"),
                               HasSubstr("expected 250 bytes more")));
}

TEST_F(Safetensors, NamesWhatIsNotThere) {
  const std::vector<float> values = {1};
  const std::vector<SafetensorsEntry> entries = {{"w", view(values)}};
  write_safetensors(folder_ / "w.safetensors", entries, {{"k", "v"}});
  const auto file = SafetensorsFile::open(folder_ / "w.safetensors");
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument, [&] { file.info("x"); }),
              HasSubstr("has no tensor \"x\" among its 1"));
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument, [&] { file.metadata("case"); }),
              HasSubstr("has no metadata \"case\"; it has \"k\""));
}

TEST_F(Safetensors, RefusesToWriteNonsense) {
  const std::vector<float> values(4);
  const auto path = folder_ / "w.safetensors";
  const auto write = [&](std::vector<SafetensorsEntry> entries,
                         const std::map<std::string, std::string>& metadata = {}) {
    const std::string text =
        test::error_text(ErrorCode::bad_argument, [&] { write_safetensors(path, entries, metadata); });
    EXPECT_THAT(names_in(folder_.path()), IsEmpty());
    return text;
  };
  EXPECT_THAT(write({{"w", view(values)}, {"w", view(values)}}), HasSubstr("tensor \"w\" is given twice"));
  EXPECT_THAT(write({{"__metadata__", view(values)}}),
              HasSubstr("a tensor may not be called \"__metadata__\""));
  ConstTensorView every_second = view(values);
  every_second.shape = Shape{2};
  every_second.strides = Strides{2};
  EXPECT_THAT(write({{"w", every_second}}),
              HasSubstr("tensor \"w\" has strides (2) at shape (2); expected contiguous"));
  EXPECT_THAT(write({{std::string("w\0x", 3), view(values)}}),
              HasSubstr("the name of a tensor, \"w\", continues after a NUL"));
  EXPECT_THAT(write({{"w", view(values)}}, {{"k", std::string(100'000'000, 'v')}}),
              HasSubstr("the header of 1 tensors has 100000"));
  EXPECT_THAT(write({{"w", view(values)}}, {{"k", "\xff"}}),
              HasSubstr("a name or a metadata string is not UTF-8"));
}

TEST_F(Safetensors, AFailedWriteLeavesTheOldFile) {
  const auto path = folder_ / "w.safetensors";
  const std::vector<float> small = {7}, large(1 << 16, 8.0F);
  const std::vector<SafetensorsEntry> old_entries = {{"w", view(small)}}, new_entries = {{"w", view(large)}};
  write_safetensors(path, old_entries);

  // A file size limit gives EFBIG in the middle of the data (the signal ignored): as a full disk does,
  // without a disk.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limited = before;
  limited.rlim_cur = 100'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
  const std::string text = test::error_text(ErrorCode::system, [&] { write_safetensors(path, new_entries); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);

  EXPECT_THAT(text,
              ::testing::AllOf(HasSubstr("cannot write " + path.string()), HasSubstr("File too large")));
  EXPECT_EQ(SafetensorsFile::open(path).read(context_, "w").f32()[0], 7.0F);
  EXPECT_THAT(names_in(folder_.path()), ElementsAre("w.safetensors"));
}

TEST_F(Safetensors, NamesTheFolderThatIsNotThere) {
  EXPECT_THAT(
      test::error_text(ErrorCode::system, [&] { write_safetensors(folder_ / "no" / "w.safetensors", {}); }),
      ::testing::AllOf(HasSubstr("cannot create"), HasSubstr("No such file or directory")));
}

}  // namespace
}  // namespace weft::safetensors_test
