#include "save_folder.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>

#include "base/hash.hpp"
#include "weft/base/error.hpp"
#include "weft/base/view.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::tools {
namespace {

std::string flag_of(const std::string& part) {
  for (const char* key : {"vocab", "head_size", "norm_eps", "tied", "init_std"})
    if (part == key) return fmt::format("[model] {}", part);
  if (part == "theta") return "[model] rope_theta";
  if (part == "floor") return "--lr-floor";
  if (part == "decay") return "--weight-decay";
  std::string flag = "--" + part;
  std::ranges::replace(flag, '_', '-');
  return flag;
}

struct Differences {
  std::string all;       // in words; empty if there are none
  bool fixed = false;    // among them is something that must stay as it is when a run goes on
  std::string schedule;  // the fields that may differ, in words
};

// `counts_samples`: the checkpoint says how many samples were drawn, so that batches may have another size.
// `where`: the two places in words.
Differences compare(const std::string& there, const std::string& here, bool counts_samples,
                    const std::pair<std::string, std::string>& where = {"there", "here"}) {
  std::map<std::string, std::string> theirs = parts_of_identity(there), ours = parts_of_identity(here);
  Differences d;
  for (const auto& [part, value] : theirs) ours.try_emplace(part, "not set");
  for (const auto& [part, value] : ours) {
    const auto at = theirs.find(part);
    const std::string other = at == theirs.end() ? "not set" : at->second;
    if (other == value) continue;
    const bool of_file =
        at != theirs.end() && value != "not set" && (part == "text" || part == "maps" || part == "targets");
    const std::string words = of_file ? fmt::format("--{} has other bytes", part)
                                      : fmt::format("{} is {} {} and {} {}", flag_of(part), other,
                                                    where.first, value, where.second);
    d.all += (d.all.empty() ? "" : ", ") + words;
    if (part == "steps" || part == "warmup" || part == "decay_steps" || (part == "batch" && counts_samples)) {
      d.schedule += (d.schedule.empty() ? "" : ", ") + words;
    } else {
      d.fixed = true;
    }
  }
  return d;
}

// Makes a file and removes it again: this detects missing permissions, read-only and full file systems.
void check_writable(const std::filesystem::path& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw_errno(fmt::format("train: --save: cannot make the folder \"{}\"", folder.string()), failed.value());
  std::string probe = (folder / ".writable-XXXXXX").string();
  const int fd = ::mkostemp(probe.data(), O_CLOEXEC);
  if (fd < 0)
    throw_errno(fmt::format("train: --save: cannot write into the folder \"{}\"", folder.string()), errno);
  ::close(fd);
  ::unlink(probe.c_str());
}

}  // namespace

void expect_same_run(ProcessGroup& group, const std::string& run) {
  const auto size = static_cast<std::size_t>(group.size());
  const std::vector<std::int64_t> mine{static_cast<std::int64_t>(hash_of(run)),
                                       static_cast<std::int64_t>(run.size())};
  std::vector<std::int64_t> all(2 * size);
  group.all_gather(mine, all).wait();
  std::int64_t longest = 0;
  bool alike = true;
  for (std::size_t r = 0; r < size; ++r) {
    alike = alike && all[2 * r] == mine[0] && all[2 * r + 1] == mine[1];
    longest = std::max(longest, all[2 * r + 1]);
  }
  // A rank that is like all others knows that nobody is unlike: all ranks return here, or none does.
  if (alike) return;
  const auto most = static_cast<std::size_t>(longest);
  std::vector<std::uint8_t> text(most), texts(most * size);
  std::ranges::copy(run, text.begin());
  group.all_gather(view(text), view(texts)).wait();
  const auto of = [&](std::size_t r) {
    return std::string(texts.begin() + static_cast<std::ptrdiff_t>(r * most),
                       texts.begin() + static_cast<std::ptrdiff_t>(r * most) + all[2 * r + 1]);
  };
  for (std::size_t r = 1; r < size; ++r)
    if (const std::string other = of(r); other != of(0))
      throw Error(Failure{
          .code = ErrorCode::mismatch,
          .text = fmt::format("train: the ranks have other options: {}",
                              compare(of(0), other, false, {"on rank 0", fmt::format("on rank {}", r)}).all),
          .ranks = {0, static_cast<int>(r)}});
}

SaveFolder look_at_save_folder(const std::filesystem::path& folder, const TrainConfig& config,
                               const std::string& resume, bool overwrite) {
  std::optional<CheckpointInfo> latest;
  if (resume != "no") {
    const WholeCheckpoint whole = newest_whole_checkpoint(folder);
    if (!whole.found && !whole.broken.empty()) throw Error(ErrorCode::corrupt, whole.broken[0]);
    latest = whole.found;
  } else if (!overwrite) {
    latest = latest_checkpoint(folder);
  }
  if (resume == "latest" && !latest)
    bad_training(fmt::format("resume: no checkpoint in \"{}\"", folder.string()));
  SaveFolder found;
  if (latest) {
    const auto run = latest->extra.find("run");
    const Differences d =
        run == latest->extra.end()
            ? Differences{.all = "it was not made by weft train", .fixed = true, .schedule = {}}
            : compare(run->second, identity_of(config), latest->extra.contains(kSamplesDrawn));
    found.resume = resume != "no";
    found.step = latest->step;
    if (found.resume && d.fixed)
      bad_training(fmt::format("resume: \"{}\" is of another run: {}", latest->folder.string(), d.all));
    if (!found.resume && !d.all.empty())
      bad_training(
          fmt::format("--save: \"{}\" is of another run, and would be replaced: {}; expected another folder, "
                      "{}--overwrite",
                      latest->folder.string(), d.all, d.fixed ? "or " : "--resume, or "));
    if (found.resume && latest->step > config.steps)
      bad_training(fmt::format("resume: \"{}\" is {} steps old; --steps is {}; expected {} or more",
                               latest->folder.string(), latest->step, config.steps, latest->step));
    if (found.resume && !d.schedule.empty())
      found.note = fmt::format("another schedule from step {} on: {}", latest->step, d.schedule);
  }
  check_writable(folder);
  return found;
}

}  // namespace weft::tools
