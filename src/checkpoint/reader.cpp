#include "weft/checkpoint/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/text/printable.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/parts.hpp"
#include "checkpoint/safetensors_write.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {

struct CheckpointReader::Impl {
  explicit Impl(OpenedCheckpoint opened)
      : folder(std::move(opened.folder)),
        index(std::move(opened.index)),
        info(info_of(opened.path, index)),
        files(std::filesystem::absolute(folder), index) {
    for (const auto& [name, entry] : index.tensors) {
      names.push_back(name);
      std::set<std::string> held;
      for (const CheckpointPart& part : entry.parts) held.insert(part.file);
      tensors[name] = {entry.dtype,
                       entry.shape,
                       entry.layout,
                       static_cast<int>(entry.parts.size()),
                       {held.begin(), held.end()}};
    }
  }

  std::filesystem::path folder;
  CheckpointIndex index;
  CheckpointInfo info;
  PartFiles files;
  std::vector<std::string> names;
  std::map<std::string, CheckpointTensor, std::less<>> tensors;
};

CheckpointReader CheckpointReader::open(const std::filesystem::path& directory) {
  return CheckpointReader(std::make_shared<Impl>(open_checkpoint(directory)));
}

const CheckpointInfo& CheckpointReader::info() const noexcept { return impl_->info; }
bool CheckpointReader::hashed() const noexcept {
  return !impl_->index.files.empty() || impl_->index.tensors.empty();
}
const std::vector<std::string>& CheckpointReader::names() const noexcept { return impl_->names; }
bool CheckpointReader::contains(std::string_view name) const {
  return impl_->tensors.find(name) != impl_->tensors.end();
}

const CheckpointTensor& CheckpointReader::tensor(std::string_view name) const {
  const auto found = impl_->tensors.find(name);
  if (found == impl_->tensors.end())
    throw Error(ErrorCode::bad_argument, fmt::format("checkpoint: {} has no tensor \"{}\" among its {}",
                                                     impl_->folder.string(), name, impl_->names.size()));
  return found->second;
}

Tensor CheckpointReader::read(Context& context, std::string_view name, Memory memory) const {
  const CheckpointTensor& info = tensor(name);
  Tensor whole(context, info.shape, info.dtype, memory);
  read_into(name, whole.view());
  return whole;
}

void CheckpointReader::read_into(std::string_view name, const TensorView& out) const {
  const CheckpointTensor& info = tensor(name);
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("checkpoint: the memory for \"{}\" {}", name, text));
  };
  if (out.device.kind != DeviceKind::cpu) wrong(is_on(out.device, {}));
  if (out.dtype != info.dtype || out.shape != info.shape)
    wrong(fmt::format("is {} {}; expected {} {}", weft::name(out.dtype), to_string(out.shape),
                      weft::name(info.dtype), to_string(info.shape)));
  if (const std::string fault = memory_fault(out); !fault.empty()) wrong(fault);
  const std::string key(name);
  const MutableNamedView view{key, out, nullptr};
  for (const HeldBox& box : boxes_of(view, 0))
    read_tensor(impl_->files, impl_->index.tensors.at(key), view, box);
}

namespace {

// The faults of one checkpoint, as they are found.
class Verification {
 public:
  Verification(const std::filesystem::path& folder, const CheckpointIndex& index,
               const std::function<void(std::int64_t, std::int64_t)>& progress)
      : index_(index), files_(folder, index), progress_(progress) {
    for (const auto& [name, entry] : index.tensors) all_ += entry.shape.count() * size_bytes(entry.dtype);
  }

  std::vector<std::string> faults() {
    for (const auto& tensor : index_.tensors) {
      for (const CheckpointPart& part : tensor.second.parts) {
        if (unreadable_.contains(part.file)) continue;
        attempt([&] { files_.of(part.file); }, [&] { unreadable_.insert(part.file); });
        if (unreadable_.contains(part.file)) continue;
        attempt([&] { check_part(part, tensor.first, tensor.second.dtype); }, [] {});
      }
    }
    return std::move(faults_);
  }

 private:
  template <class Action, class Failed>
  void attempt(const Action& action, const Failed& failed) {
    try {
      action();
    } catch (const Error& e) {
      faults_.push_back(e.what());
      failed();
    }
  }
  void check_part(const CheckpointPart& part, const std::string& tensor, DType dtype) {
    const SafetensorsFile& file = files_.of(part, tensor, dtype);
    const std::string& name = part.name.empty() ? tensor : part.name;
    const std::int64_t bytes = file.info(name).bytes;
    if (!index_.files.empty() && bytes > 0 && !has_hashes(file, name))
      faults_.push_back(
          fmt::format("checkpoint: {}: has no hashes of \"{}\"", file.path().string(), printable(name)));
    std::vector<std::byte> chunk;
    for (std::int64_t at = 0; at < bytes; at += kHashedChunk) {
      chunk.resize(static_cast<std::size_t>(std::min(kHashedChunk, bytes - at)));
      attempt([&] { read_verified(file, name, at, chunk); }, [] {});
      read_ += static_cast<std::int64_t>(chunk.size());
      if (progress_) progress_(read_, all_);
    }
  }

  const CheckpointIndex& index_;
  PartFiles files_;
  const std::function<void(std::int64_t, std::int64_t)>& progress_;
  std::set<std::string> unreadable_;
  std::vector<std::string> faults_;
  std::int64_t read_ = 0, all_ = 0;
};

}  // namespace

std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory,
                                           const std::function<void(std::int64_t, std::int64_t)>& progress) {
  try {
    for (int look = 1;; ++look) {
      const OpenedCheckpoint opened = open_checkpoint(directory);
      std::vector<std::string> faults = Verification(opened.folder, opened.index, progress).faults();
      const bool is_file = opened.path != opened.folder;
      if (faults.empty() || is_file || look == kMostLooks ||
          !has_moved_on(directory, {opened.folder, {}, opened.hash}))
        return faults;
    }
  } catch (const Error& e) {
    return {e.what()};
  }
}

std::size_t export_checkpoint(const std::filesystem::path& directory, const std::filesystem::path& file,
                              const ExportOptions& options) {
  const CheckpointReader reader = CheckpointReader::open(directory);
  Context context;
  Tensor current;  // the one that is being written
  std::map<std::string, std::string> origins;
  std::vector<PlannedTensor> tensors;
  for (const std::string& name : reader.names()) {
    const std::string to = options.rename ? options.rename(name) : name;
    if (to.empty()) continue;
    const auto [known, added] = origins.emplace(to, name);
    if (!added)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("export_checkpoint: \"{}\" and \"{}\" would both be called \"{}\"",
                              known->second, name, to));
    const CheckpointTensor& info = reader.tensor(name);
    tensors.push_back({to, info.dtype, info.shape, [&reader, &context, &current, &options, name] {
                         current = Tensor();  // before the next one takes memory
                         if (options.value) current = options.value(reader, name);
                         if (!current) current = reader.read(context, name);
                         const ConstTensorView data = current.view();
                         return std::span(data.data, static_cast<std::size_t>(data.bytes()));
                       }});
  }
  if (tensors.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("export_checkpoint: of the {} tensors of {} none is left", reader.names().size(),
                            reader.info().folder.string()));
  std::map<std::string, std::string> metadata = reader.info().extra;
  metadata["weft_step"] = std::to_string(reader.info().step);
  write_safetensors(file, tensors, metadata);
  return tensors.size();
}

}  // namespace weft
