// Saving and loading a training run on one rank: round trips, kills at every stage, a full disk, texts of
// errors. Runs over several ranks are in checkpoint_ranks_test.cpp.
#include "weft/train/checkpoint.hpp"
#include "checkpoint/content_hash.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "train/tiny_run.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft::checkpoint_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;

using test::TinyRun;
using ::testing::UnorderedElementsAre;

const DeviceMesh kOneRank;

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  return names;
}

// A run in a process of its own or in the test's.
struct LocalRun : TinyRun {
  explicit LocalRun(Context& context, int width = 3) : TinyRun(context, kOneRank, width) {}
  void save(const std::filesystem::path& directory, std::int64_t step, const SaveOptions& options = {}) {
    fill(static_cast<float>(step));
    save_checkpoint(directory, kOneRank, step, parameters, &*optimizer,
                    {{"position", std::to_string(step * 10)}}, options);
  }
  CheckpointInfo load(const std::filesystem::path& directory) {
    fill(-1);
    return load_checkpoint(directory, kOneRank, parameters, &*optimizer);
  }
};

// `directory` holds a whole checkpoint of `step`.
void expect_loads(const std::filesystem::path& directory, std::int64_t step) {
  Context context;
  LocalRun run(context);
  const CheckpointInfo info = run.load(directory);
  EXPECT_EQ(info.step, step);
  EXPECT_EQ(info.extra.at("position"), std::to_string(step * 10));
  run.expect_filled(static_cast<float>(step));
}

TEST(Checkpoint, GivesBackWhatWasSaved) {
  const test::TemporaryFolder folder;
  Context context;
  LocalRun run(context);
  EXPECT_FALSE(latest_checkpoint(folder.path()));
  run.save(folder / "run", 7);
  EXPECT_THAT(names_in(folder / "run"), UnorderedElementsAre("step-00000007", "latest"));
  EXPECT_THAT(names_in(folder / "run" / "step-00000007"),
              UnorderedElementsAre("rank-00000.safetensors", "index.json"));

  expect_loads(folder / "run", 7);
  expect_loads(folder / "run" / "step-00000007", 7);
  run.save(folder / "run", 8);
  expect_loads(folder / "run", 8);
  expect_loads(folder / "run" / "step-00000007", 7);  // still there
  EXPECT_EQ(latest_checkpoint(folder / "run")->folder, folder / "run" / "step-00000008");

  // The file is an ordinary one, with the names of the model.
  const auto file = SafetensorsFile::open(folder / "run" / "step-00000007" / "rank-00000.safetensors");
  EXPECT_THAT(file.names(), Contains("param.first.weight"));
  EXPECT_THAT(file.names(), Contains("optimizer.momentum.first.weight"));
  EXPECT_THAT(file.names(), Contains("optimizer.step.first.weight"));
}

// A bf16 weight is its rounded master, whether the load succeeded or not.
TEST(Checkpoint, ALoadThatFailsHalfwayLeavesNoOldWeights) {
  const test::TemporaryFolder folder;
  Context context;
  const auto model = [&] {
    auto m = std::make_unique<test::TinyModel>(3);
    for (const char* path : {"first.weight", "second"}) m->parameter(path)->set_dtype(DType::bf16);
    return m;
  };
  Compute compute(context);
  const auto saved = model();
  materialise(*saved, compute);
  for (Parameter* p : saved->parameters())
    for (float& x : p->write_master().as<float>()) x = 3;
  save_checkpoint(folder.path(), kOneRank, 1, *saved, {});
  {  // a byte of first.weight, which is read after second
    std::fstream file(folder / "step-00000001" / "rank-00000.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    std::uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), sizeof(header));
    file.seekp(static_cast<std::streamoff>(sizeof(header) + header));
    file.put('\x7f');
  }
  const auto loaded = model();
  materialise(*loaded, compute);
  Parameter& second = *loaded->parameter("second");
  for (float& x : second.write_master().as<float>()) x = 1;
  EXPECT_EQ(static_cast<float>(second.weight().as<bf16>()[0]), 1);
  EXPECT_THAT(test::error_text([&] { load_checkpoint(folder.path(), kOneRank, *loaded, {}); }),
              HasSubstr("first.weight"));
  EXPECT_EQ(second.master().as<float>()[0], 3);
  EXPECT_EQ(static_cast<float>(second.weight().as<bf16>()[0]), 3);
  EXPECT_FALSE(loaded->parameter("first.weight")->has_values());
}

TEST(Checkpoint, ReplacesTheSameStep) {
  const test::TemporaryFolder folder;
  Context context;
  LocalRun run(context);
  run.save(folder.path(), 7);
  run.fill(100);
  save_checkpoint(folder.path(), kOneRank, 7, run.parameters, &*run.optimizer, {{"position", "again"}});
  EXPECT_EQ(run.load(folder.path()).extra.at("position"), "again");
  run.expect_filled(100);
  EXPECT_THAT(names_in(folder.path()), UnorderedElementsAre("step-00000007", "latest"));
}

TEST(Checkpoint, LoadsParametersAlone) {
  const test::TemporaryFolder folder;
  Context context;
  LocalRun run(context);
  run.save(folder.path(), 3);
  LocalRun other(context);
  other.fill(-1);
  load_checkpoint(folder.path(), kOneRank, other.parameters, nullptr);
  other.expect_parameters_filled(3);
  other.expect_state_filled(-1);
}

// A child saves step 1, then dies at a stage of saving step 2: step 1, or from "latest" on step 2, is there
// and whole. checkpoint_kill_test.cpp has all points, and more ranks.
TEST(Checkpoint, AKillAtAnyStageLeavesAWholeCheckpoint) {
  const std::vector<std::string> stages = {"folder", "data", "data#2", "file", "index", "renamed", "latest"};
  for (const std::string& stage : stages) {
    SCOPED_TRACE(stage);
    const test::TemporaryFolder folder;
    const auto result = test::run_in_child([&] {
      Context context;
      LocalRun run(context);
      run.save(folder.path(), 1);
      std::map<std::string, int> seen;
      SaveOptions options;
      options.on_stage = [&](std::string_view reached) {
        const int times = ++seen[std::string(reached)];
        if (stage == (times == 1 ? std::string(reached) : std::string(reached) + "#" + std::to_string(times)))
          ::kill(::getpid(), SIGKILL);
      };
      run.save(folder.path(), 2, options);
      return 0;
    });
    ASSERT_EQ(result.status.signal, SIGKILL) << test::to_string(result) << ": the stage was not reached";
    // A context is made only in children: this process is to fork again.
    EXPECT_TRUE(test::run_in_child([&] {
                  expect_loads(folder.path(), stage == "latest" ? 2 : 1);
                  // The next save takes away what was left and is whole.
                  Context context;
                  LocalRun run(context);
                  run.save(folder.path(), 2);
                  expect_loads(folder.path(), 2);
                  EXPECT_THAT(names_in(folder.path()),
                              UnorderedElementsAre("step-00000001", "step-00000002", "latest"));
                  return 0;
                }).ok());
  }
}

// Kills during a save in which step 2 replaces an older step 2 that `latest` names.
TEST(Checkpoint, AKillWhileReplacingLeavesAWholeCheckpoint) {
  for (const std::string stage : {"data", "index", "exchanged", "renamed"}) {
    SCOPED_TRACE(stage);
    const test::TemporaryFolder folder;
    const auto result = test::run_in_child([&] {
      Context context;
      LocalRun run(context);
      run.save(folder.path(), 2);
      SaveOptions options;
      options.on_stage = [&](std::string_view reached) {
        if (reached == stage) ::kill(::getpid(), SIGKILL);
      };
      run.save(folder.path(), 2, options);
      return 0;
    });
    ASSERT_EQ(result.status.signal, SIGKILL) << test::to_string(result);
    EXPECT_TRUE(test::run_in_child([&] { return expect_loads(folder.path(), 2), 0; }).ok());
  }
}

void expect_survives_a_failed_save(const std::filesystem::path& directory, const std::string& reason,
                                   const std::function<void()>& before, const std::function<void()>& after) {
  EXPECT_TRUE(test::run_in_child([&] {
                Context context;
                LocalRun run(context);
                run.save(directory, 1);
                LocalRun large(context, 1 << 18);
                before();
                const std::string text =
                    test::error_text(ErrorCode::system, [&] { large.save(directory, 2); });
                after();
                EXPECT_THAT(text, AllOf(HasSubstr("save_checkpoint: cannot write"),
                                        HasSubstr("rank-00000.safetensors"),
                                        EndsWith(reason + "; " + directory.string() + " is as it was")));
                EXPECT_THAT(names_in(directory), UnorderedElementsAre("step-00000001", "latest"));
                expect_loads(directory, 1);
                run.save(directory, 2);
                expect_loads(directory, 2);
                return 0;
              }).ok());
}

TEST(Checkpoint, AFileSizeLimitLeavesTheCheckpointBefore) {
  const test::TemporaryFolder folder;
  expect_survives_a_failed_save(
      folder.path(), ": File too large (ulimit -f is 1024)",
      [] {
        const rlimit limit{1 << 20, RLIM_INFINITY};
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
      },
      [] {
        const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
      });
}

TEST(Checkpoint, AFullDiskLeavesTheCheckpointBefore) {
  const test::TemporaryFolder folder;
  if (::mount("weft-test", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0)
    GTEST_SKIP() << "a small file system cannot be mounted here (needs root)";
  std::filesystem::create_directory(folder / "run");
  expect_survives_a_failed_save(
      folder / "run", ": No space left on device", [] {}, [] {});
  EXPECT_EQ(::umount(folder.path().c_str()), 0);
}

TEST(Checkpoint, ListsEveryTensorThatDoesNotFit) {
  const test::TemporaryFolder folder;
  Context context;
  LocalRun run(context);
  run.save(folder.path(), 1);
  LocalRun wider(context, 4);
  wider.add_third(kOneRank);
  const std::string text = test::error_text(ErrorCode::bad_argument, [&] { wider.load(folder.path()); });
  EXPECT_THAT(text, HasSubstr("step-00000001 does not fit the model; missing in the checkpoint ("));
  EXPECT_THAT(text, HasSubstr("param.third f32 (2)"));
  EXPECT_THAT(text, HasSubstr("param.first.weight f32 (2, 3), expected f32 (2, 4)"));
  wider.expect_filled(-1);  // nothing was changed

  LocalRun narrower(context);
  narrower.parameters.pop_back();
  const std::string extra = test::error_text(ErrorCode::bad_argument, [&] {
    load_checkpoint(folder.path(), kOneRank, narrower.parameters, nullptr);
  });
  EXPECT_THAT(extra, EndsWith("does not fit the model; not in the model (1): param.first.weight"));
}

// The text of an index as save_checkpoint() would have written it.
std::string sealed(nlohmann::json index) {
  index["hash"] = kNoHash;
  std::string text = index.dump(1);
  seal(text);
  return text;
}
// As version 1 wrote it.
nlohmann::json without_hashes(nlohmann::json index) {
  index["version"] = 1;
  index.erase("hash");
  index.erase("files");
  return index;
}

TEST(Checkpoint, RefusesWhatIsNoCheckpoint) {
  const test::TemporaryFolder folder;
  Context context;
  LocalRun run(context);
  const auto refusal = [&](ErrorCode code = ErrorCode::corrupt) {
    return test::error_text(code, [&] { run.load(folder.path()); });
  };
  EXPECT_THAT(refusal(ErrorCode::bad_argument),
              EndsWith("holds no checkpoint: neither latest nor index.json"));
  std::ofstream(folder / "latest") << "step-00000009\n";
  EXPECT_THAT(refusal(),
              HasSubstr("/latest names \"step-00000009\", which is no checkpoint in the same folder"));
  EXPECT_THAT(test::error_text(ErrorCode::corrupt, [&] { latest_checkpoint(folder.path()); }),
              HasSubstr("step-00000009"));

  run.save(folder.path(), 1);
  const auto index_path = folder / "step-00000001" / "index.json";
  const auto sound = nlohmann::json::parse(test::contents(index_path));
  const auto with = [&](const std::function<void(nlohmann::json&)>& change,
                        ErrorCode code = ErrorCode::corrupt) {
    nlohmann::json index = sound;
    change(index);
    std::ofstream(index_path) << sealed(index);
    return refusal(code);
  };
  EXPECT_THAT(with([](auto& i) { i["format"] = "other"; }),
              HasSubstr("index.json: \"format\" is not \"weft checkpoint\""));
  EXPECT_THAT(with([](auto& i) { i["version"] = 3; }, ErrorCode::unsupported),
              HasSubstr("index.json: has version 3; this build reads 1 and 2"));
  EXPECT_THAT(with([](auto& i) { i.erase("step"); }), HasSubstr("index.json: is no index: "));
  EXPECT_THAT(
      with([](auto& i) { i["tensors"]["param.second"]["parts"][0]["offset"] = {1}; }),
      HasSubstr(
          "the part of \"param.second\" in rank-00000.safetensors is (5) at (1), outside of the whole (5)"));
  EXPECT_THAT(with([](auto& i) { i["tensors"]["param.second"]["parts"][0]["shape"] = {4}; }),
              HasSubstr("the 1 parts of \"param.second\" have 4 elements; expected 5 (shape (5))"));
  EXPECT_THAT(with(
                  [](auto& i) {
                    i["tensors"]["param.second"]["shape"] = {1, 5};
                    i["tensors"]["param.second"]["parts"][0]["shape"] = {1, 5};
                    i["tensors"]["param.second"]["parts"][0]["offset"] = {0, 0};
                  },
                  ErrorCode::bad_argument),
              HasSubstr("param.second f32 (1, 5), expected f32 (5)"));
  std::ofstream(index_path) << "{";
  EXPECT_THAT(refusal(), HasSubstr("index.json: is no index: "));

  // An index that is sound by itself, but not what the file holds.
  std::ofstream(index_path) << sealed(without_hashes(sound));
  const std::vector<float> four(4);
  const std::vector<SafetensorsEntry> entries = {{"param.second", view(four)}};
  write_safetensors(folder / "step-00000001" / "rank-00000.safetensors", entries);
  EXPECT_THAT(refusal(), HasSubstr("has param.second as f32 (4); the index says f32 (5)"));
}

// The index of a saved run, with something in it changed.
class ChangedIndex : public ::testing::Test {
 protected:
  void SetUp() override {
    run_.save(folder_.path(), 1);
    sound_ = test::contents(path_);
  }
  std::string refusal_of(const std::string& text) {
    std::ofstream(path_) << text;
    const std::string prefix = "checkpoint: " + path_.string() + ": ";
    const std::string why = test::error_text(ErrorCode::corrupt, [&] { latest_checkpoint(folder_.path()); });
    EXPECT_THAT(why, ::testing::StartsWith(prefix));
    return why.substr(std::min(prefix.size(), why.size()));
  }
  std::string refusal(const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json index = nlohmann::json::parse(sound_);
    change(index);
    return refusal_of(sealed(index));
  }
  std::string with_parts(const std::string& tensor, const nlohmann::json& parts) {
    return refusal([&](auto& i) { i["tensors"][tensor]["parts"] = parts; });
  }

  test::TemporaryFolder folder_;
  Context context_;
  LocalRun run_{context_};
  const std::filesystem::path path_ = folder_ / "step-00000001" / "index.json";
  std::string sound_;
};

nlohmann::json part(std::vector<std::int64_t> offset, std::vector<std::int64_t> shape) {
  return {{"file", "rank-00000.safetensors"}, {"offset", std::move(offset)}, {"shape", std::move(shape)}};
}

TEST_F(ChangedIndex, EachElementIsInOnePart) {
  EXPECT_EQ(with_parts("param.second", {part({0}, {3}), part({2}, {2})}),
            "element (2) of \"param.second\" is in 2 of its 2 parts; expected 1");
  EXPECT_EQ(with_parts("param.first.weight", {part({0, 0}, {1, 3}), part({0, 0}, {1, 3})}),
            "element (0, 0) of \"param.first.weight\" is in 2 of its 2 parts; expected 1");
  EXPECT_EQ(with_parts("param.first.weight", {part({1, 0}, {1, 3}), part({1, 0}, {1, 3})}),
            "element (0, 0) of \"param.first.weight\" is in 0 of its 2 parts; expected 1");
  EXPECT_EQ(with_parts("param.first.weight", {part({0, 0}, {2, 1}), part({0, 1}, {1, 1}),
                                              part({0, 2}, {2, 1}), part({0, 2}, {1, 1})}),
            "element (0, 2) of \"param.first.weight\" is in 2 of its 4 parts; expected 1");
  std::ofstream(path_) << sound_;
  EXPECT_TRUE(latest_checkpoint(folder_.path()));
}

TEST_F(ChangedIndex, EveryNumberIsOneThatCanBeMeant) {
  const std::string range = "; expected an integer from 0 to 9223372036854775807";
  EXPECT_EQ(refusal([](auto& i) { i["step"] = 1e300; }), "is no index: step is 1e+300" + range);
  EXPECT_EQ(refusal([](auto& i) { i["step"] = 8.7; }), "is no index: step is 8.7" + range);
  EXPECT_EQ(refusal([](auto& i) { i["step"] = -1; }), "is no index: step is -1" + range);
  EXPECT_EQ(refusal([](auto& i) { i["step"] = "1"; }), "is no index: step is \"1\"" + range);
  EXPECT_EQ(refusal([](auto& i) { i["step"] = 9223372036854775808u; }),
            "is no index: step is 9223372036854775808" + range);
  const std::string second = "is no index: tensors.param.second.";
  EXPECT_EQ(refusal([](auto& i) {
              i["tensors"]["param.second"]["shape"] = {4611686018427387904, 4};
            }),
            second + "shape is (4611686018427387904, 4) of f32; a product beyond 2^63 - 1 bytes");
  EXPECT_EQ(refusal([](auto& i) { i["tensors"]["param.second"]["shape"] = std::vector<int>(9, 1); }),
            second + "shape has 9 dimensions; at most 8 are supported");
  EXPECT_EQ(refusal([](auto& i) { i["tensors"]["param.second"]["parts"][0]["offset"] = {-1}; }),
            second + "parts[0].offset[0] is -1" + range);
  EXPECT_EQ(refusal([](auto& i) { i["tensors"]["param.second"]["parts"][0]["shape"] = {5.5}; }),
            second + "parts[0].shape[0] is 5.5" + range);
  EXPECT_EQ(refusal([](auto& i) { i["tensors"]["param.second"]["dtype"] = "f31"; }),
            second + "dtype is \"f31\", which weft does not know");
  EXPECT_EQ(refusal([](auto& i) { i["extra"]["position"] = 3; }),
            "is no index: extra.position is 3; expected a text");
}

TEST_F(ChangedIndex, FilesAreThoseOfItsFolder) {
  const auto with_file = [&](const std::string& file) {
    return refusal([&](auto& i) { i["tensors"]["param.second"]["parts"][0]["file"] = file; });
  };
  const auto text = [](const std::string& what) {
    return "is no index: tensors.param.second.parts[0].file is " + what +
           "; expected the name of a file in the same folder";
  };
  EXPECT_EQ(with_file("../other/rank-00000.safetensors"),
            text("\"../other/rank-00000.safetensors\", in another folder"));
  EXPECT_EQ(with_file("/etc/passwd"), text("\"/etc/passwd\", in another folder"));
  EXPECT_EQ(with_file(".."), text("\"..\", in another folder"));
  EXPECT_EQ(with_file(""), text("empty"));
  EXPECT_EQ(with_file(std::string("rank-00000.safetensors\0x", 24)), text("a text with control characters"));
  EXPECT_EQ(with_file(std::string(300, 'x')), text("a text of 300 characters, more than the 255 of a name"));
}

TEST_F(ChangedIndex, TheTextIsBounded) {
  EXPECT_EQ(refusal_of(std::string(100'000, '[')), "is no index: it nests deeper than 32 levels");
  std::string twice = sound_;
  twice.insert(1, "\"step\": 7,");
  EXPECT_EQ(refusal_of(twice), "is no index: it has the key \"step\" twice");
  std::filesystem::resize_file(path_, (std::size_t{256} << 20) + 1);  // a hole
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument, [&] { latest_checkpoint(folder_.path()); }),
              EndsWith("index.json: has more than 268435456 bytes"));
  std::filesystem::remove(path_);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument, [&] { latest_checkpoint(folder_.path()); }),
              EndsWith("index.json: is not a regular file (it is a FIFO)"));
}

// 60000 parts in no order: each pair of them would take minutes.
TEST_F(ChangedIndex, ManyPartsAreCheckedInTime) {
  constexpr std::int64_t kParts = 60'000;
  nlohmann::json parts = nlohmann::json::array();
  for (std::int64_t i = 0; i < kParts; ++i) parts.push_back(part({i * 7919 % kParts}, {1}));
  const auto began = Clock::now();
  EXPECT_EQ(refusal([&](auto& i) {
              parts.back()["offset"] = {7};
              i["tensors"]["param.second"]["shape"] = {kParts};
              i["tensors"]["param.second"]["parts"] = parts;
            }),
            "element (7) of \"param.second\" is in 2 of its 60000 parts; expected 1");
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));  // some 0.3 s
}

TEST_F(ChangedIndex, LatestNamesAFolderBesideIt) {
  const auto latest = [&](const std::string& text, ErrorCode code = ErrorCode::corrupt) {
    std::ofstream(folder_ / "latest", std::ios::binary) << text;
    return test::error_text(code, [&] { latest_checkpoint(folder_.path()); });
  };
  const std::string start = "checkpoint: " + (folder_ / "latest").string();
  const std::string end = "; expected the name of a folder in the same place";
  EXPECT_EQ(latest(std::string(5000, 's'), ErrorCode::bad_argument), start + ": has more than 4096 bytes");
  EXPECT_EQ(latest(std::string(300, 's')),
            start + " names what is a text of 300 characters, more than the 255 of a name" + end);
  EXPECT_EQ(latest(std::string("step-00000001\0/../x", 20)),
            start + " names what is a text with control characters" + end);
  EXPECT_EQ(latest("..\n"), start + " names what is \"..\", in another folder" + end);
  EXPECT_EQ(latest(""), start + " names what is empty" + end);
  std::filesystem::remove(folder_ / "latest");
  ASSERT_EQ(::mkfifo((folder_ / "latest").c_str(), 0600), 0);
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument, [&] { latest_checkpoint(folder_.path()); }),
            start + ": is not a regular file (it is a FIFO)");
  EXPECT_THAT(test::error_text(ErrorCode::system, [&] { run_.load(std::string(300, 'd')); }),
              AllOf(HasSubstr("cannot look for ddd"), EndsWith("/index.json: File name too long")));
}

// Paths that leave the folder: links in place of each of its files, and names in the index.
TEST_F(ChangedIndex, WhatLiesElsewhereIsRefused) {
  for (const char* name : {"../rank-00000.safetensors", "/etc/passwd", "a/b", "..", ""})
    EXPECT_THAT(refusal([&](auto& i) { i["tensors"]["param.second"]["parts"][0]["file"] = name; }),
                HasSubstr("; expected the name of a file in the same folder"))
        << name;
  std::ofstream(path_) << sound_;
  expect_loads(folder_.path(), 1);
  const test::TemporaryFolder elsewhere;
  for (const auto& path : {path_, folder_ / "step-00000001" / "rank-00000.safetensors", folder_ / "latest",
                           folder_ / "step-00000001"}) {
    const std::filesystem::path moved = elsewhere / path.filename().string();
    std::filesystem::copy(path, moved, std::filesystem::copy_options::recursive);
    std::filesystem::rename(path, path.string() + ".old");
    std::filesystem::create_symlink(moved, path);
    EXPECT_EQ(test::error_text([&] { run_.load(folder_.path()); }),
              "bad_argument: checkpoint: " + path.string() + " is a symbolic link to " + moved.string() +
                  "; expected that file or folder itself");
    std::filesystem::remove(path);
    std::filesystem::rename(path.string() + ".old", path);
  }
  // The path that a program gives may lead over links.
  std::filesystem::create_symlink(folder_.path(), elsewhere / "run");
  expect_loads(elsewhere / "run", 1);
}

TEST(Checkpoint, RefusesToSaveNonsense) {
  const test::TemporaryFolder folder;
  Context context;
  LocalRun run(context);
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument, [&] { run.save(folder.path(), -1); }),
            "save_checkpoint: step is -1; expected 0 or more");
  std::vector<Parameter*> twice = {run.parameters[0], run.parameters[0]};
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                             [&] { save_checkpoint(folder.path(), kOneRank, 1, twice, nullptr); }),
            "save_checkpoint: two parameters have the path second");
  std::vector<Parameter*> one = {run.parameters[0]};
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument,
                               [&] { save_checkpoint(folder.path(), kOneRank, 1, one, &*run.optimizer); }),
              HasSubstr("the optimizer has state of first.weight, which is not among the parameters"));
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}}, 0);
  EXPECT_EQ(test::error_text(ErrorCode::layout,
                             [&] { save_checkpoint(folder.path(), mesh, 1, run.parameters, nullptr); }),
            "save_checkpoint: second is a plain tensor; on dp=2 it needs a layout, which says what part of "
            "the whole it is");
  std::ofstream(folder / "file") << "";
  EXPECT_THAT(test::error_text(ErrorCode::system, [&] { run.save(folder / "file" / "run", 1); }),
              AllOf(HasSubstr("save_checkpoint: "), HasSubstr("/file/run: Not a directory")));
}

// --- models: buffers, and weights in bf16 ---

struct Counting : Module {
  Counting() {
    weight = add("weight", std::make_shared<Parameter>(Shape{3}, Constant{1}));
    weight->set_dtype(DType::bf16);
    count = add("count", std::make_shared<ModuleBuffer>(Shape{2}, DType::i64));
    scratch = add("scratch", std::make_shared<ModuleBuffer>(Shape{2}, DType::f32, Constant{0}, false));
  }
  ParameterRef weight;
  ModuleBufferRef count, scratch;

 private:
  Tensors do_forward(Inputs, Frame&) override { return {}; }
  Tensors do_backward(Inputs, Frame&) override { return {}; }
};

TEST(Checkpoint, AModelIsSavedWithItsBuffers) {
  const test::TemporaryFolder folder;
  Context context;
  Compute compute(context);
  Counting model, again;
  for (Counting* m : {&model, &again}) {
    materialise(*m, compute);
    initialise(*m, 1);
  }
  model.count->tensor().as<std::int64_t>()[1] = 7;
  model.scratch->tensor().f32()[0] = 8;
  model.weight->write_master().f32()[2] = 2;
  save_checkpoint(folder.path(), kOneRank, 1, model, nullptr);
  EXPECT_EQ(static_cast<float>(again.weight->weight().as<bf16>()[2]), 1.0f);
  load_checkpoint(folder.path(), kOneRank, again, nullptr);
  EXPECT_THAT(again.count->tensor().as<std::int64_t>(), ::testing::ElementsAre(0, 7));
  EXPECT_THAT(again.scratch->tensor().f32(), ::testing::ElementsAre(0, 0)) << "not saved";
  EXPECT_EQ(static_cast<float>(again.weight->weight().as<bf16>()[2]), 2.0f) << "made anew from the master";
  load_checkpoint(folder.path(), kOneRank, again.parameters(), nullptr);  // parameters alone
  save_checkpoint(folder.path(), kOneRank, 2, model.parameters(), nullptr);
  EXPECT_THAT(test::error_text(ErrorCode::bad_argument,
                               [&] { load_checkpoint(folder.path(), kOneRank, again, nullptr); }),
              HasSubstr("missing in the checkpoint (1): buffer.count"));
}

TEST(Checkpoint, APartOfAMeshIsRefused) {
  const test::TemporaryFolder folder;
  Context context;
  Compute compute(context);
  Counting model;
  materialise(model, compute);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 1}, {"tp", 1}}, 0);
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                             [&] { save_checkpoint(folder.path(), mesh["tp"], 1, model, nullptr); }),
            "save_checkpoint: mesh is tp=1, a part of dp=1 x tp=1; expected the whole");
}

}  // namespace
}  // namespace weft::checkpoint_test
