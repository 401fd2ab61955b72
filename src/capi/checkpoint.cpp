// Checkpoints in C. Comments in weft/c/checkpoint.h say which functions block.
#include <algorithm>
#include <cstddef>
#include <stdexcept>

#include <fmt/ranges.h>

#include "base/errors/caught.hpp"
#include "capi/call_out.hpp"
#include "capi/mesh_handles.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/convert.hpp"
#include "weft/checkpoint/full_state.hpp"
#include "weft/checkpoint/reader.hpp"

using weft::ErrorCode;
namespace capi = weft::capi;

struct weft_checkpoint_reader : capi::Handle<weft_checkpoint_reader> {
  static constexpr const char* kKind = "weft_checkpoint_reader";
  explicit weft_checkpoint_reader(weft::CheckpointReader reader_in)
      : reader(std::move(reader_in)), folder(reader.info().folder.string()) {
    for (const auto& entry : reader.info().extra) extra.push_back(&entry);
  }
  weft::CheckpointReader reader;
  std::string folder;
  std::vector<const std::pair<const std::string, std::string>*> extra;  // entries of the reader's info()
};

struct weft_checkpoint_saver : capi::Handle<weft_checkpoint_saver> {
  static constexpr const char* kKind = "weft_checkpoint_saver";
  weft_checkpoint_saver(capi::MeshOwner owner_in, const weft::DeviceMesh& mesh,
                        weft::AsyncCheckpoint::Busy busy)
      : owner(std::move(owner_in)), saves(mesh, busy) {}
  capi::MeshOwner owner;
  weft::AsyncCheckpoint saves;
};

namespace {

constexpr std::size_t kSaveOptionsFirstBytes = 8;
static_assert(offsetof(weft_checkpoint_save_options, on_stage) == kSaveOptionsFirstBytes);
static_assert(sizeof(weft_checkpoint_save_options) == 24);
constexpr std::size_t kLoadOptionsFirstBytes = 24;
static_assert(sizeof(weft_checkpoint_load_options) == kLoadOptionsFirstBytes);
constexpr std::size_t kExportOptionsFirstBytes = 24;
static_assert(sizeof(weft_checkpoint_export_options) == kExportOptionsFirstBytes);
constexpr std::size_t kConvertOptionsFirstBytes = 40;
static_assert(sizeof(weft_checkpoint_convert_options) == kConvertOptionsFirstBytes);
static_assert(sizeof(weft_checkpoint_string) == 16);  // have no struct_size: they stay as they are
static_assert(sizeof(weft_checkpoint_tensor) == 88);

// It is no Error, so that it is not taken for a fault of a checkpoint. Other ranks get its text.
struct CallbackThrew : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class Call>
auto called(const Call& call) {
  const capi::CallOut out;
  if (!out) throw CallbackThrew{capi::kEnded};
  try {
    return call();
  } catch (...) {
    throw CallbackThrew(weft::caught_words());
  }
}

// Calls a function of the program with a stage of a save. When weft may not call it any more, the save
// continues without it.
void tell_stage(const weft_checkpoint_save_options& o, std::string_view stage) {
  const capi::CallOut out;
  if (out) o.on_stage(o.data, std::string(stage).c_str());
}

[[noreturn]] void refuse_thrown(const char* function, const char* callback, const CallbackThrew& e) {
  capi::refuse(ErrorCode::system, function, fmt::format("{} threw: {}", callback, e.what()));
}

// The name that a function of the program's gives a tensor; "" leaves it out.
std::string renamed(const char* (*rename)(void* data, const char* name), void* data, std::string_view name) {
  const std::string ended(name);
  const char* const given = called([&] { return rename(data, ended.c_str()); });
  return given != nullptr ? given : "";
}

weft::DeviceMesh mesh_or_none(const char* function, const weft_mesh* mesh) {
  const weft_mesh* const over = capi::given_or_null(function, mesh, "mesh");
  return over != nullptr ? over->mesh : weft::DeviceMesh();
}

weft::CheckpointExtra extra_of(const char* function, const weft_checkpoint_string* extra,
                               std::int32_t count) {
  weft::CheckpointExtra all;
  int index = 0;
  for (const weft_checkpoint_string& s : capi::list_of(function, extra, count, "extra", "extra_count")) {
    const std::string entry = fmt::format("extra[{}]", index++);
    const char* const key = capi::text_of(function, s.key, (entry + ".key").c_str());
    const char* const value = capi::text_of(function, s.value, (entry + ".value").c_str());
    if (!all.emplace(key, value).second)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("{}.key is \"{}\", which is in the list already", entry, key));
  }
  return all;
}

const weft_checkpoint_reader& reader_of(const char* function, const weft_checkpoint_reader* reader) {
  return capi::given(function, reader, "reader");
}

// Entry `index` of a list of the reader's.
template <class List>
const auto& entry_of(const char* function, const List& list, std::int32_t index) {
  if (index < 0 || static_cast<std::size_t>(index) >= list.size())
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("index is {}; expected {}", index,
                    list.empty() ? "none, as there are none" : fmt::format("0 to {}", list.size() - 1)));
  return list[static_cast<std::size_t>(index)];
}

}  // namespace

weft_status weft_checkpoint_save(const char* directory, const weft_mesh* mesh, int64_t step,
                                 const weft_tensor* tensors, int32_t count,
                                 const weft_checkpoint_string* extra, int32_t extra_count,
                                 const weft_checkpoint_save_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const to = capi::text_of(function, directory, "directory");
    const std::vector<weft::MutableNamedView> list = capi::tensors_of(function, tensors, count, "tensors");
    const weft::CheckpointExtra strings = extra_of(function, extra, extra_count);
    const weft_checkpoint_save_options o =
        capi::read(function, options, weft_checkpoint_save_options WEFT_CHECKPOINT_SAVE_OPTIONS_INIT,
                   kSaveOptionsFirstBytes, "WEFT_CHECKPOINT_SAVE_OPTIONS_INIT");
    weft::SaveOptions save{.keep = o.keep};
    if (o.on_stage != nullptr)
      save.on_stage = [&](std::string_view stage) {
        try {
          tell_stage(o, stage);
        } catch (...) {
          throw CallbackThrew{weft::caught_words()};
        }
      };
    try {
      weft::save_checkpoint(to, mesh_or_none(function, mesh), step,
                            std::vector<weft::NamedView>(list.begin(), list.end()), strings, save);
    } catch (const CallbackThrew& e) {
      refuse_thrown(function, "options->on_stage", e);
    }
  });
}

weft_status weft_checkpoint_saver_create(const weft_mesh* mesh, bool refuse, weft_checkpoint_saver** saver,
                                         weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_checkpoint_saver*& to = capi::given(function, saver, "saver");
    using Busy = weft::AsyncCheckpoint::Busy;
    const weft::DeviceMesh over = mesh_or_none(function, mesh);
    to = new weft_checkpoint_saver{mesh != nullptr ? mesh->owner : capi::MeshOwner{}, over,
                                   refuse ? Busy::refuse : Busy::wait};
  });
}

void weft_checkpoint_saver_destroy(weft_checkpoint_saver* saver) { capi::destroy(__func__, saver, "saver"); }

weft_status weft_checkpoint_saver_save(weft_checkpoint_saver* saver, const char* directory, int64_t step,
                                       const weft_tensor* tensors, int32_t count,
                                       const weft_checkpoint_string* extra, int32_t extra_count,
                                       const weft_checkpoint_save_options* options, bool* begun,
                                       weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::AsyncCheckpoint& saves = capi::given(function, saver, "saver").saves;
    const char* const to = capi::text_of(function, directory, "directory");
    const std::vector<weft::MutableNamedView> list = capi::tensors_of(function, tensors, count, "tensors");
    const weft::CheckpointExtra strings = extra_of(function, extra, extra_count);
    const weft_checkpoint_save_options o =
        capi::read(function, options, weft_checkpoint_save_options WEFT_CHECKPOINT_SAVE_OPTIONS_INIT,
                   kSaveOptionsFirstBytes, "WEFT_CHECKPOINT_SAVE_OPTIONS_INIT");
    weft::SaveOptions save{.keep = o.keep};
    if (o.on_stage != nullptr) save.on_stage = [o](std::string_view stage) { tell_stage(o, stage); };
    const bool accepted =
        saves.save(to, step, std::vector<weft::NamedView>(list.begin(), list.end()), strings, save);
    if (begun != nullptr) *begun = accepted;
  });
}

weft_status weft_checkpoint_saver_wait(weft_checkpoint_saver* saver, weft_error* error) {
  return capi::guarded(__func__, error,
                       [&, function = __func__] { capi::given(function, saver, "saver").saves.wait(); });
}

namespace {

// Calls a function of the host's; false is an error, as what it throws.
void call_whole(const char* function, const char* argument, weft_whole_function whole_function, void* data,
                std::string_view name, const weft::ConstTensorView& whole) {
  const std::string ended(name);
  const weft_buffer buffer{const_cast<std::byte*>(whole.data), whole.count(),
                           static_cast<weft_dtype>(whole.dtype), WEFT_CPU};
  if (!called([&] { return whole_function(data, ended.c_str(), &buffer); }))
    capi::refuse(ErrorCode::system, function, fmt::format("{} returned false for \"{}\"", argument, name));
}

}  // namespace

weft_status weft_gather_full_state(const weft_mesh* mesh, const weft_tensor* tensors, int32_t count,
                                   int32_t root, weft_whole_function see, void* data, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::vector<weft::MutableNamedView> list = capi::tensors_of(function, tensors, count, "tensors");
    if (see == nullptr) capi::refuse(ErrorCode::bad_argument, function, "see is NULL");
    try {
      weft::gather_full_state(mesh_or_none(function, mesh),
                              std::vector<weft::NamedView>(list.begin(), list.end()), root,
                              [&](std::string_view name, const weft::ConstTensorView& whole) {
                                call_whole(function, "see", see, data, name, whole);
                              });
    } catch (const CallbackThrew& e) {
      refuse_thrown(function, "see", e);
    }
  });
}

weft_status weft_set_full_state(const weft_mesh* mesh, const weft_tensor* tensors, int32_t count,
                                int32_t root, weft_whole_function give, void* data, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::vector<weft::MutableNamedView> list = capi::tensors_of(function, tensors, count, "tensors");
    if (give == nullptr) capi::refuse(ErrorCode::bad_argument, function, "give is NULL");
    try {
      weft::set_full_state(mesh_or_none(function, mesh), list, root,
                           [&](std::string_view name, const weft::TensorView& whole) {
                             call_whole(function, "give", give, data, name, whole);
                           });
    } catch (const CallbackThrew& e) {
      refuse_thrown(function, "give", e);
    }
  });
}

weft_status weft_checkpoint_load(const char* directory, const weft_mesh* mesh, const weft_tensor* tensors,
                                 int32_t count, const weft_checkpoint_load_options* options, int64_t* step,
                                 weft_text** folder, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const from = capi::text_of(function, directory, "directory");
    const std::vector<weft::MutableNamedView> list = capi::tensors_of(function, tensors, count, "tensors");
    const weft_checkpoint_load_options o =
        capi::read(function, options, weft_checkpoint_load_options WEFT_CHECKPOINT_LOAD_OPTIONS_INIT,
                   kLoadOptionsFirstBytes, "WEFT_CHECKPOINT_LOAD_OPTIONS_INIT");
    weft::LoadOptions load;
    if (o.may_leave != nullptr)
      load.may_leave = [&](std::string_view name) {
        const std::string ended(name);
        return called([&] { return o.may_leave(o.data, ended.c_str()); });
      };
    try {
      const weft::CheckpointInfo info = weft::load_checkpoint(from, mesh_or_none(function, mesh), list, load);
      if (folder != nullptr) *folder = new weft_text{info.folder.string()};
      if (step != nullptr) *step = info.step;
    } catch (const CallbackThrew& e) {
      refuse_thrown(function, "options->may_leave", e);
    }
  });
}

weft_status weft_checkpoint_latest(const char* directory, weft_text** folder, int64_t* step,
                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const in = capi::text_of(function, directory, "directory");
    weft_text*& folder_to = capi::given(function, folder, "folder");
    int64_t& step_to = capi::given(function, step, "step");
    const std::optional<weft::CheckpointInfo> info = weft::latest_checkpoint(in);
    folder_to = info ? new weft_text{info->folder.string()} : nullptr;
    step_to = info ? info->step : -1;
  });
}

weft_status weft_checkpoint_reader_open(const char* directory, weft_checkpoint_reader** reader,
                                        weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const from = capi::text_of(function, directory, "directory");
    weft_checkpoint_reader*& to = capi::given(function, reader, "reader");
    to = new weft_checkpoint_reader{weft::CheckpointReader::open(from)};
  });
}

void weft_checkpoint_reader_destroy(weft_checkpoint_reader* reader) {
  capi::destroy(__func__, reader, "reader");
}

weft_status weft_checkpoint_reader_step(const weft_checkpoint_reader* reader, int64_t* step,
                                        weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_checkpoint_reader& of = reader_of(function, reader);
    capi::given(function, step, "step") = of.reader.info().step;
  });
}

weft_status weft_checkpoint_reader_folder(const weft_checkpoint_reader* reader, const char** folder,
                                          weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_checkpoint_reader& of = reader_of(function, reader);
    capi::given(function, folder, "folder") = of.folder.c_str();
  });
}

weft_status weft_checkpoint_reader_mesh(const weft_checkpoint_reader* reader, const char** mesh,
                                        weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_checkpoint_reader& of = reader_of(function, reader);
    capi::given(function, mesh, "mesh") = of.reader.info().mesh.c_str();
  });
}

weft_status weft_checkpoint_reader_hashed(const weft_checkpoint_reader* reader, bool* hashed,
                                          weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_checkpoint_reader& of = reader_of(function, reader);
    capi::given(function, hashed, "hashed") = of.reader.hashed();
  });
}

weft_status weft_checkpoint_reader_extra_count(const weft_checkpoint_reader* reader, int32_t* count,
                                               weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_checkpoint_reader& of = reader_of(function, reader);
    capi::given(function, count, "count") = static_cast<int32_t>(of.extra.size());
  });
}

weft_status weft_checkpoint_reader_extra(const weft_checkpoint_reader* reader, int32_t index,
                                         weft_checkpoint_string* extra, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const auto& [key, value] = *entry_of(function, reader_of(function, reader).extra, index);
    capi::given(function, extra, "extra") = {key.c_str(), value.c_str()};
  });
}

weft_status weft_checkpoint_reader_tensor_count(const weft_checkpoint_reader* reader, int32_t* count,
                                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_checkpoint_reader& of = reader_of(function, reader);
    capi::given(function, count, "count") = static_cast<int32_t>(of.reader.names().size());
  });
}

weft_status weft_checkpoint_reader_tensor(const weft_checkpoint_reader* reader, int32_t index,
                                          weft_checkpoint_tensor* tensor, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::CheckpointReader& of = reader_of(function, reader).reader;
    const std::string& name = entry_of(function, of.names(), index);
    const weft::CheckpointTensor& found = of.tensor(name);
    weft_checkpoint_tensor& to = capi::given(function, tensor, "tensor");
    to = {name.c_str(), static_cast<weft_dtype>(found.dtype), found.shape.rank(), {}, found.shape.count()};
    std::copy(found.shape.begin(), found.shape.end(), to.extents);
  });
}

weft_status weft_checkpoint_reader_find(const weft_checkpoint_reader* reader, const char* name,
                                        int32_t* index, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::vector<std::string>& names = reader_of(function, reader).reader.names();
    const std::string_view wanted = capi::text_of(function, name, "name");
    const auto at = std::lower_bound(names.begin(), names.end(), wanted);
    capi::given(function, index, "index") =
        at != names.end() && *at == wanted ? static_cast<int32_t>(at - names.begin()) : -1;
  });
}

weft_status weft_checkpoint_reader_read(const weft_checkpoint_reader* reader, int32_t index,
                                        const weft_buffer* out, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::CheckpointReader& of = reader_of(function, reader).reader;
    const std::string& name = entry_of(function, of.names(), index);
    const weft::Buffer to = capi::buffer_of(function, out, "out");
    of.read_into(name, capi::view_of(to, of.tensor(name).shape));
  });
}

weft_status weft_checkpoint_verify(const char* directory,
                                   void (*progress)(void* data, int64_t bytes, int64_t all), void* data,
                                   weft_text** faults, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const of = capi::text_of(function, directory, "directory");
    weft_text*& to = capi::given(function, faults, "faults");
    std::function<void(std::int64_t, std::int64_t)> tell;
    if (progress != nullptr)
      tell = [&](std::int64_t bytes, std::int64_t all) { called([&] { progress(data, bytes, all); }); };
    try {
      to = new weft_text{fmt::format("{}", fmt::join(weft::verify_checkpoint(of, tell), "\n"))};
    } catch (const CallbackThrew& e) {
      refuse_thrown(function, "progress", e);
    }
  });
}

weft_status weft_checkpoint_export(const char* directory, const char* file,
                                   const weft_checkpoint_export_options* options, int64_t* written,
                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const from = capi::text_of(function, directory, "directory");
    const char* const path = capi::text_of(function, file, "file");
    const weft_checkpoint_export_options o =
        capi::read(function, options, weft_checkpoint_export_options WEFT_CHECKPOINT_EXPORT_OPTIONS_INIT,
                   kExportOptionsFirstBytes, "WEFT_CHECKPOINT_EXPORT_OPTIONS_INIT");
    weft::ExportOptions to;
    if (o.rename != nullptr)
      to.rename = [&](std::string_view name) { return renamed(o.rename, o.data, name); };
    try {
      const std::size_t tensors = weft::export_checkpoint(from, path, to);
      if (written != nullptr) *written = static_cast<int64_t>(tensors);
    } catch (const CallbackThrew& e) {
      refuse_thrown(function, "options->rename", e);
    }
  });
}

weft_status weft_checkpoint_convert(const char* directory, const char* to,
                                    const weft_checkpoint_convert_options* options, int64_t* written,
                                    weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char* const from = capi::text_of(function, directory, "directory");
    const char* const folder = capi::text_of(function, to, "to");
    const weft_checkpoint_convert_options o =
        capi::read(function, options, weft_checkpoint_convert_options WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT,
                   kConvertOptionsFirstBytes, "WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT");
    weft::ConvertOptions convert;
    if (o.files != 0) convert.files = o.files;
    if (o.old_names) convert.remap = weft::remap_old_names;
    if (o.rename != nullptr)
      convert.rename = [&](std::string_view name) { return renamed(o.rename, o.data, name); };
    const char* asked = "options->rename";  // as long as nothing asks for a dtype
    if (o.dtype != nullptr)
      convert.dtype = [&](std::string_view name, weft::DType stored) {
        const std::string ended(name);
        asked = "options->dtype";
        const weft_dtype given =
            called([&] { return o.dtype(o.data, ended.c_str(), static_cast<weft_dtype>(stored)); });
        asked = "options->rename";
        return capi::dtype_of(function, given,
                              fmt::format("what options->dtype gave for \"{}\"", ended).c_str());
      };
    try {
      const std::size_t tensors = weft::convert_checkpoint(from, folder, convert);
      if (written != nullptr) *written = static_cast<int64_t>(tensors);
    } catch (const CallbackThrew& e) {
      refuse_thrown(function, asked, e);
    }
  });
}
