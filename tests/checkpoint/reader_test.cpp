// Reads checkpoints without a mesh: global tensors, verification, export into one file, and how many
// checkpoints are kept.
#include "weft/checkpoint/reader.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <numeric>
#include <vector>

#include "checkpoint/content_hash.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft::reader_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr auto kBad = ErrorCode::bad_argument;

// Two ranks save: a fused weight whose rows are cut in segments, one of more than a chunk, a scalar, an empty
// one.
class SavedByTwo : public ::testing::Test {
 protected:
  static constexpr std::int64_t kLong = kHashedChunk / 4 + 1000;  // of f32, on each rank

  void SetUp() override {
    test::run_ranks(Ranks::threads, 2, [&](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"tp", 2}});
      const LayoutRef fused = make_layout(mesh, {{"tp", Shard{0}}}, {9, 2})->segmented(0, {4, 5});
      const LayoutRef cut = make_layout(mesh, {{"tp", Shard{0}}}, {2 * kLong});
      std::vector<double> rows;
      for (const Box& box : fused->parts())
        for (std::int64_t row = 0; row < box.shape[0]; ++row)
          for (int column = 0; column < 2; ++column)
            rows.push_back(static_cast<double>(10 * (box.offset[0] + row) + column));
      std::vector<float> values(static_cast<std::size_t>(kLong));
      std::iota(values.begin(), values.end(), static_cast<float>(r.rank * kLong));
      const std::int64_t steps = 12;
      save_checkpoint(
          folder_.path(), mesh, 5,
          std::vector<NamedView>{{"fused", view(rows.data(), fused->local_shape()), fused},
                                 {"long", view(values), cut},
                                 {"steps", view(&steps, Shape{}), replicated_layout(mesh, {})},
                                 {"empty", view(&steps, Shape{0, 3}), replicated_layout(mesh, {0, 3})}},
          {{"sampler", "128"}});
    });
  }
  std::filesystem::path file(int rank) const {
    return folder_ / "step-00000005" / ("rank-0000" + std::to_string(rank) + ".safetensors");
  }
  void flip(const std::filesystem::path& path, std::int64_t at) const {
    std::fstream f(path, std::ios::binary | std::ios::in | std::ios::out);
    f.seekg(at);
    const int byte = f.get();
    f.seekp(at);
    f.put(static_cast<char>(byte ^ 8));
  }

  test::TemporaryFolder folder_;
  Context context_;
};

TEST_F(SavedByTwo, IsReadWholeByOneProcess) {
  const CheckpointReader reader = CheckpointReader::open(folder_.path());
  EXPECT_EQ(reader.info().step, 5);
  EXPECT_EQ(reader.info().mesh, "tp=2");
  EXPECT_EQ(reader.info().extra.at("sampler"), "128");
  EXPECT_TRUE(reader.hashed());
  EXPECT_THAT(reader.names(), ElementsAre("empty", "fused", "long", "steps"));
  const CheckpointTensor& fused = reader.tensor("fused");
  EXPECT_EQ(fused.dtype, DType::f64);
  EXPECT_EQ(fused.shape, (Shape{9, 2}));
  EXPECT_EQ(fused.parts, 4);
  EXPECT_THAT(fused.layout, ElementsAre("Shard(0)"));
  EXPECT_THAT(fused.files, ElementsAre("rank-00000.safetensors", "rank-00001.safetensors"));

  const Tensor rows = reader.read(context_, "fused");
  for (int i = 0; i < 18; ++i) EXPECT_EQ(rows.view().as<double>()[i], 10 * (i / 2) + i % 2);
  const Tensor values = reader.read(context_, "long");
  ASSERT_EQ(values.shape(), (Shape{2 * kLong}));
  for (std::int64_t i = 0; i < 2 * kLong; ++i) ASSERT_EQ(values.view().as<float>()[i], static_cast<float>(i));
  EXPECT_EQ(reader.read(context_, "steps").view().as<std::int64_t>()[0], 12);
  EXPECT_EQ(reader.read(context_, "empty").shape(), (Shape{0, 3}));
  EXPECT_EQ(error_text(kBad, [&] { (void)reader.read(context_, "other"); }),
            "checkpoint: " + (folder_ / "step-00000005").string() + " has no tensor \"other\" among its 4");
  EXPECT_THAT(error_text(kBad, [&] { CheckpointReader::open(folder_ / "none"); }),
              HasSubstr("none holds no checkpoint: neither latest nor index.json"));
}

TEST_F(SavedByTwo, EveryFaultIsListed) {
  std::int64_t read = 0, all = 0;
  EXPECT_THAT(
      verify_checkpoint(folder_.path(), [&](std::int64_t done, std::int64_t of) { read = done, all = of; }),
      ElementsAre());
  EXPECT_EQ(read, all);
  EXPECT_EQ(all, 18 * 8 + 2 * kLong * 4 + 8);

  const SafetensorsFile first = SafetensorsFile::open(file(0)), second = SafetensorsFile::open(file(1));
  flip(file(0), first.info("steps").begin);
  flip(file(1), second.info("long").begin + 7);                  // its first chunk
  flip(file(1), second.info("long").begin + kHashedChunk + 40);  // and its second
  EXPECT_THAT(verify_checkpoint(folder_.path()),
              UnorderedElementsAre(HasSubstr("rank-00000.safetensors: bytes "),
                                   HasSubstr("rank-00001.safetensors: bytes "),
                                   HasSubstr("rank-00001.safetensors: bytes ")));
  std::filesystem::remove(file(1));
  EXPECT_THAT(verify_checkpoint(folder_.path()),
              UnorderedElementsAre(HasSubstr("of \"steps\", are not those"),
                                   "checkpoint: " + file(1).string() + ": is missing; the index names it"));
  std::ofstream(folder_ / "step-00000005" / "index.json") << "{";
  EXPECT_THAT(verify_checkpoint(folder_.path()), ElementsAre(HasSubstr("index.json: is no index")));
}

TEST_F(SavedByTwo, IsExportedAsOneFile) {
  const auto out = folder_ / "all.safetensors";
  EXPECT_EQ(export_checkpoint(folder_.path(), out), 4u);
  const SafetensorsFile whole = SafetensorsFile::open(out);
  EXPECT_EQ(whole.metadata("sampler"), "128");
  EXPECT_EQ(whole.metadata("weft_step"), "5");
  const Tensor rows = whole.read(context_, "fused");
  for (int i = 0; i < 18; ++i) EXPECT_EQ(rows.view().as<double>()[i], 10 * (i / 2) + i % 2);

  ExportOptions some;
  some.rename = [](std::string_view name) {
    return name == "long" ? std::string("model.long") : std::string();
  };
  EXPECT_EQ(export_checkpoint(folder_.path(), out, some), 1u);
  EXPECT_THAT(SafetensorsFile::open(out).names(), ElementsAre("model.long"));
  some.rename = [](std::string_view) { return std::string("same"); };
  EXPECT_EQ(error_text(kBad, [&] { export_checkpoint(folder_.path(), out, some); }),
            "export_checkpoint: \"empty\" and \"fused\" would both be called \"same\"");
  some.rename = [](std::string_view) { return std::string(); };
  EXPECT_EQ(
      error_text(kBad, [&] { export_checkpoint(folder_.path(), out, some); }),
      "export_checkpoint: of the 4 tensors of " + (folder_ / "step-00000005").string() + " none is left");

  flip(file(1), SafetensorsFile::open(file(1)).info("long").begin);
  EXPECT_THAT(error_text(ErrorCode::corrupt, [&] { export_checkpoint(folder_.path(), out); }),
              HasSubstr("are not those that were written"));
  EXPECT_THAT(SafetensorsFile::open(out).names(), ElementsAre("model.long"));  // the old file
}

TEST(Keep, TheNewestAreKept) {
  const test::TemporaryFolder folder;
  const float x = 1;
  const auto save = [&](std::int64_t step, int keep) {
    save_checkpoint(folder.path(), DeviceMesh(), step, std::vector<NamedView>{{"x", view(&x, 1)}}, {},
                    {.keep = keep});
  };
  const auto there = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      names.push_back(entry.path().filename());
    return names;
  };
  std::filesystem::create_directory(folder / "step-7");         // somebody's own
  std::filesystem::create_directory(folder / "step-00000001");  // no checkpoint
  for (const std::int64_t step : {2, 4, 6, 100000000, 8}) save(step, 0);
  save(10, 3);  // steps after it stay
  EXPECT_THAT(there(), UnorderedElementsAre("step-7", "step-00000001", "step-00000006", "step-00000008",
                                            "step-00000010", "step-100000000", "latest"));
  save(100000001, 1);
  EXPECT_THAT(there(), UnorderedElementsAre("step-7", "step-00000001", "step-100000001", "latest"));
  EXPECT_EQ(error_text(kBad, [&] { save(1, -1); }),
            "save_checkpoint: options.keep is -1; expected 0 or more");
}

}  // namespace
}  // namespace weft::reader_test
