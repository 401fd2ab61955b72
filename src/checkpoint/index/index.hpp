// A checkpoint's index: which tensors it has, their global sizes, and which file holds which part. Plain
// values and arithmetic; callable from any thread.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mesh/boxes.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {

/// One part of a tensor, and its place.
struct CheckpointPart {
  std::string file;
  Box box;
  std::string name{};  ///< the name under which the file holds it; empty: the tensor's name
};

struct CheckpointEntry {
  DType dtype = DType::f32;
  Shape shape;  ///< of the global tensor
  std::vector<std::string>
      layout;  ///< per mesh axis, as it was when written, for people; loading does not need it
  std::vector<CheckpointPart> parts;
};

/// A file of parts.
struct CheckpointFile {
  std::uint64_t header_hash = 0;  ///< SafetensorsFile::header_hash()
};

struct CheckpointIndex {
  std::int64_t step = 0;
  std::string mesh;
  CheckpointExtra extra;
  std::map<std::string, CheckpointEntry> tensors;
  std::map<std::string, CheckpointFile>
      files{};  ///< by name; empty: written by version 1, which had no hashes
};

inline constexpr std::string_view kIndexFile = "index.json";
inline constexpr std::string_view kLatestFile = "latest";
inline constexpr std::size_t kMaxIndexBytes = std::size_t{256} << 20;

/// The name of a checkpoint's folder: "step-00000200".
inline std::string folder_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

/// Returns the contents of a `latest` that names this folder: the name, and the name's hash.
std::string latest_text(std::string_view folder);
/// Returns the name in a text of `latest`; a name that people have written has no hash. Throws bad_argument
/// that names `latest` if the text is no name of a folder next to `latest`, or has the hash of another name.
std::string folder_of_latest(const std::filesystem::path& latest, const std::string& text);

std::string to_json(const CheckpointIndex& index);
/// Throws bad_argument that names `path` if the text is no index of a known version; if it differs from what
/// was written (its hash is another); if a number in it is out of range; if a part's file is not in the
/// index's folder; or if the parts of a tensor do not cover each of its elements once.
CheckpointIndex index_from_json(const std::filesystem::path& path, const std::string& text);

/// The shape of the global tensor.
inline const Shape& global_shape(const NamedView& tensor) {
  return tensor.layout != nullptr ? tensor.layout->global : tensor.data.shape;
}

/// Throws the errors that save_checkpoint() documents for tensors that cannot be saved or loaded. `what`
/// begins the text. Two tensors may be the same memory completely, but may not overlap otherwise.
void check_tensors(std::string_view what, const DeviceMesh& mesh, std::span<const NamedView> tensors);

/// The part of the tensor that `rank` of the mesh holds. It is one box, or one for each segment.
inline std::vector<HeldBox> boxes_of(const NamedView& tensor, int rank) {
  return held_boxes(global_shape(tensor), tensor.layout, rank);
}
/// A contiguous copy of such a part of a tensor with segments, which this rank holds.
std::vector<std::byte> take_box(const NamedView& tensor, const HeldBox& box);

/// "rank-00003.safetensors"
std::string part_file(int rank);

/// A distinct part of a tensor, and the lowest rank that holds it.
struct OwnedPart {
  int rank = 0;
  Box box;
  std::size_t number = 0, of = 1;  ///< among the boxes that this rank holds
};
/// The parts of a run on `ranks` ranks, without empty parts. Distinct parts do not overlap.
std::vector<OwnedPart> parts_of(const NamedView& tensor, int ranks);

/// Throws mismatch on all ranks, with the first difference in the text, if they do not pass the same tensors
/// in the same order. Returns the `own` of every rank, which travels with the comparison. Collective.
std::vector<std::uint64_t> expect_same_tensors(std::string_view what, const DeviceMesh& mesh,
                                               std::span<const NamedView> tensors,
                                               std::span<const std::uint64_t> own = {});

/// For each tensor, the index of the first earlier tensor that is the same memory (a tied tensor: equal
/// place, dtype, shape and layout). -1: none. An empty tensor is no alias.
std::vector<int> aliases_of(std::span<const NamedView> tensors);

/// The index of a run on `ranks` ranks: each distinct part once, stored by the lowest rank that holds it.
/// Empty parts are left out. An alias has the parts of the tensor that `aliases` names. The hashes of the
/// files are not known yet.
CheckpointIndex make_index(std::span<const NamedView> tensors, int ranks, std::span<const int> aliases = {});

/// Calls `action` on all ranks of the mesh. If it throws on one, all throw that error, with the consequence:
/// `<what>: rank 1 failed: <its text>; <consequence>`. Collective.
void run_on_all(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
                const std::function<void()>& action);

/// Like save_checkpoint() and load_checkpoint(), for the tensors that a function lists. All ranks get the
/// function's errors. All ranks call the function equally often, and before anything that fails on one rank
/// alone, so that it may exchange messages. Such a function throws on all ranks or on none. `owner`: the
/// owner of the tensors in the texts: "the model".
void save_listed(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                 const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                 const SaveOptions& options);
/// Like save_listed() above, but in the background, as by AsyncCheckpoint::save().
bool save_listed(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                 const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                 const SaveOptions& options);
CheckpointInfo load_listed(const std::filesystem::path& directory, const DeviceMesh& mesh,
                           const std::function<std::vector<MutableNamedView>()>& list,
                           const LoadOptions& options, std::string_view owner);

}  // namespace weft
