// A checkpoint whose bytes are not those that were written is refused, wherever the change is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <numeric>
#include <vector>

#include "checkpoint/content_hash.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/checkpoint.hpp"

namespace weft::hashes_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;

std::vector<char> bytes_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const std::filesystem::path& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// One rank's tensors, saved as steps 0 and 1: a wrong `latest` may name a folder that is there.
class Saved : public ::testing::Test {
 protected:
  void SetUp() override {
    std::iota(wide_.begin(), wide_.end(), 0.5f);
    for (int step = 0; step < 2; ++step)
      save_checkpoint(folder_.path(), DeviceMesh(), step, views(), {{"k", "v"}});
  }
  std::vector<NamedView> views() const {
    const auto targets = const_cast<Saved*>(this)->targets();
    return {targets.begin(), targets.end()};
  }
  std::vector<MutableNamedView> targets() {
    return {{"wide", view(wide_.data(), {4, 3})}, {"count", view(&count_, 1)}};
  }
  void load() { load_checkpoint(folder_.path(), DeviceMesh(), targets()); }

  std::filesystem::path at(const char* file) const { return folder_ / "step-00000001" / file; }

  test::TemporaryFolder folder_;
  std::vector<float> wide_ = std::vector<float>(12);
  std::int64_t count_ = 7;
};

// Every bit of `latest`, and every seventh of the longer ones.
TEST_F(Saved, EveryFlippedBitIsFound) {
  for (const auto& path : {at("rank-00000.safetensors"), at("index.json"), folder_ / "latest"}) {
    const std::vector<char> sound = bytes_of(path);
    ASSERT_FALSE(sound.empty());
    const std::size_t stride = sound.size() < 100 ? 1 : 7;
    for (std::size_t bit = 0; bit < 8 * sound.size(); bit += stride) {
      std::vector<char> changed = sound;
      changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
      write(path, changed);
      EXPECT_THROW(load(), Error) << path.filename() << ", bit " << bit;
    }
    write(path, sound);
    load();
  }
}

TEST_F(Saved, TheTextNamesFileAndBytes) {
  const auto refusal = [&](const char* file, const char* from, const char* to) {
    const std::vector<char> sound = bytes_of(at(file));
    std::string text(sound.begin(), sound.end());
    const std::size_t place = text.find(from);
    EXPECT_NE(place, text.npos) << from;
    text.replace(place, std::strlen(to), to);
    write(at(file), {text.begin(), text.end()});
    const std::string why = error_text(ErrorCode::corrupt, [&] { load(); });
    write(at(file), sound);
    return why;
  };
  const std::string file = "checkpoint: " + at("rank-00000.safetensors").string() + ": ";
  EXPECT_THAT(refusal("rank-00000.safetensors", "\"weft_step\":\"1\"", "\"weft_step\":\"2\""),
              HasSubstr(file + "its header is not the one that was written: it has the hash "));
  EXPECT_EQ(refusal("index.json", "\"k\": \"v\"", "\"k\": \"w\""),
            "checkpoint: " + at("index.json").string() +
                ": is not as it was written: its \"hash\" is that of another text");

  const SafetensorsFile sound = SafetensorsFile::open(at("rank-00000.safetensors"));
  const SafetensorsInfo info = sound.info("wide");
  std::vector<char> changed = bytes_of(sound.path());
  changed[static_cast<std::size_t>(info.begin) + 5] ^= 4;
  write(sound.path(), changed);
  EXPECT_EQ(error_text(ErrorCode::corrupt, [&] { load(); }),
            file + "bytes " + std::to_string(info.begin) + " to " + std::to_string(info.begin + 48) +
                ", of \"wide\", are not those that were written (their hash is not " +
                sound.metadata("xxh3:wide") + ")");

  std::vector<char> latest = bytes_of(folder_ / "latest");
  latest[12] = '0';  // step-00000000 is there
  write(folder_ / "latest", latest);
  EXPECT_EQ(error_text(ErrorCode::corrupt, [&] { load(); }),
            "checkpoint: " + (folder_ / "latest").string() +
                " is not as it was written: it has the hash of another name than \"step-00000000\"");
}

// Three chunks and a half, with rows that begin and end within chunks.
TEST(Chunks, OfWhatIsReadAreVerifiedAndNoOthers) {
  const test::TemporaryFolder folder;
  Context context;
  const std::int64_t count = 7 * kHashedChunk / 2;
  std::vector<std::uint8_t> data(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint8_t>(i * 2654435761u >> 13);
  const std::map<std::string, std::string> metadata = {
      {hashes_key("t"), chunk_hashes(std::as_bytes(std::span(data)))}};
  EXPECT_EQ(metadata.begin()->second.size(), 4u * 16);
  write_safetensors(folder / "f", std::vector<SafetensorsEntry>{{"t", view(data)}}, metadata);
  const SafetensorsFile file = SafetensorsFile::open(folder / "f");
  const auto read = [&](std::int64_t from, std::int64_t to) {
    std::vector<std::uint8_t> part(static_cast<std::size_t>(to - from));
    read_verified(file, "t", from, std::as_writable_bytes(std::span(part)));
    return std::equal(part.begin(), part.end(), data.begin() + from);
  };
  for (const auto& [from, to] : {std::pair{std::int64_t{0}, count},
                                 {std::int64_t{1}, count - 1},
                                 {kHashedChunk, 2 * kHashedChunk},
                                 {kHashedChunk - 1, kHashedChunk + 1},
                                 {3 * kHashedChunk + 5, count},
                                 {count, count},
                                 {std::int64_t{0}, std::int64_t{0}}})
    EXPECT_TRUE(read(from, to)) << from << " to " << to;

  std::fstream spoil(folder / "f", std::ios::binary | std::ios::in | std::ios::out);
  spoil.seekp(file.info("t").begin + 2 * kHashedChunk);
  spoil.put(static_cast<char>(data[static_cast<std::size_t>(2 * kHashedChunk)] + 1));
  spoil.close();
  EXPECT_TRUE(read(0, 2 * kHashedChunk));
  EXPECT_TRUE(read(3 * kHashedChunk, count));
  EXPECT_THAT(error_text(ErrorCode::corrupt, [&] { read(0, 2 * kHashedChunk + 1); }),
              HasSubstr(", of \"t\", are not those that were written"));
  EXPECT_THAT(error_text(ErrorCode::corrupt, [&] { read(3 * kHashedChunk - 1, count); }),
              HasSubstr(", of \"t\", are not those that were written"));
}

TEST(Chunks, TheNumberOfHashesIsThatOfTheChunks) {
  const test::TemporaryFolder folder;
  const std::vector<float> data(3);
  write_safetensors(folder / "f", std::vector<SafetensorsEntry>{{"t", view(data)}},
                    {{hashes_key("t"), "12"}});
  std::vector<float> out(3);
  EXPECT_EQ(error_text(ErrorCode::corrupt,
                       [&] {
                         read_verified(SafetensorsFile::open(folder / "f"), "t", 0,
                                       std::as_writable_bytes(std::span(out)));
                       }),
            "checkpoint: " + (folder / "f").string() +
                ": the hashes of \"t\" have 2 digits; expected 16 for its 12 bytes");
}

TEST(Hashes, AreThoseOfEveryRanksFile) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 2}});
    const LayoutRef layout = make_layout(mesh, {{"tp", Shard{0}}}, {4});
    std::vector<float> data = {1, 2};
    save_checkpoint(folder.path(), mesh, 3, std::vector<NamedView>{{"t", view(data), layout}});
    r.group().barrier().wait();
    const std::filesystem::path file = folder / "step-00000003" / "rank-00001.safetensors";
    if (r.rank == 0) {
      std::vector<char> bytes = bytes_of(file);
      bytes.back() ^= 1;
      write(file, bytes);
    }
    r.group().barrier().wait();
    const std::string text = error_text(ErrorCode::corrupt, [&] {
      load_checkpoint(folder.path(), mesh, std::vector<MutableNamedView>{{"t", view(data), layout}});
    });
    EXPECT_THAT(text, HasSubstr("are not those that were written"));
    EXPECT_THAT(text, HasSubstr(r.rank == 1 ? "" : "load_checkpoint: rank 1 failed: checkpoint: "));
  });
}

}  // namespace
}  // namespace weft::hashes_test
