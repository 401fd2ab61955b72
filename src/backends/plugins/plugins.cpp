// Finding and loading transports. A plug-in is loaded once and never unloaded, because its code may be on the
// stack of a thread that cannot be ended.
#include "weft/backends/plugin.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>

#include "backends/auto_backend.hpp"
#include "backends/build.hpp"
#include "backends/plugins/linkage.hpp"
#include "backends/plugins/older_backend.hpp"
#include "backends/shm/shm_backend.hpp"
#include "base/errors/caught.hpp"
#include "base/files/regular_file.hpp"
#include "weft/base/env.hpp"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "libweft_backend_", kSuffix = ".so";
constexpr const char* kEntry = "weft_backend_plugin";

[[noreturn]] void refuse(const std::string& file, const std::string& what) {
  throw Error(ErrorCode::unsupported, fmt::format("{}: {}", file, what));
}

// Calls a function of a plug-in and returns its result. Any exception of the function becomes unsupported,
// with the file's name.
template <class F>
auto call_plugin(const std::string& file, std::string_view function, const F& f) {
  try {
    return f();
  } catch (...) {
    refuse(file, fmt::format("{}() threw: {}", function, caught_words()));
  }
}

// The shared object, or the program, to which an address belongs.
struct Image {
  const void* base = nullptr;  // null: none
  std::string file;
};
Image image_of(const void* address) {
  Dl_info info{};
  if (::dladdr(address, &info) == 0) return {};
  return {info.dli_fbase, info.dli_fname != nullptr ? info.dli_fname : ""};
}
Image own_image() { return image_of(linked_weft()); }

// Returns the folder of libweft itself.
std::string own_folder() {
  std::error_code ignored;
  const fs::path file = fs::canonical(own_image().file, ignored);
  return ignored ? std::string() : file.parent_path().string();
}

// Throws if a plug-in calls another libweft than this one. The dynamic loader decides which libweft a plug-in
// calls. If several have one soname, it is the one that the process has loaded first. `address`: any address
// in the libweft that the plug-in calls.
void expect_bound_to_this_weft(const std::string& file, const void* address) {
  const Image bound = image_of(address), own = own_image();
  if (bound.base == own.base) return;
  refuse(file,
         fmt::format("calls the libweft in {}; expected {}, which loads it: the process has both, and the "
                     "dynamic loader has bound the plug-in to the other one",
                     bound.file, own.file));
}

// Whether a file of this name exists. A link counts as existing even if its target is missing. The error then
// says so.
bool exists(const std::string& file) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(file, ignored));
}

std::string file_of(const std::string& folder, std::string_view name) {
  return fmt::format("{}/{}{}{}", folder, kPrefix, name, kSuffix);
}

// How many bytes a BackendPlugin of each minor has.
constexpr std::size_t kBytesOfMinor[] = {offsetof(BackendPlugin, obstacle),
                                         offsetof(BackendPlugin, linked_to),
                                         offsetof(BackendPlugin, linked_to),
                                         offsetof(BackendPlugin, linked_to),
                                         sizeof(BackendPlugin),
                                         sizeof(BackendPlugin),
                                         sizeof(BackendPlugin)};
static_assert(std::size(kBytesOfMinor) == kBackendAbiMinor + 1);

// The description of a plug-in that this weft can use. A field that the plug-in lacks, because its minor
// version is older, is null. Throws unsupported.
BackendPlugin compatible(const std::string& file, const BackendPlugin& plugin) {
  // If the ABI differs, no field except the first may be read.
  if (plugin.abi != kBackendAbi)
    refuse(file,
           fmt::format("built for backend ABI {}; expected {}: {}", plugin.abi, kBackendAbi,
                       plugin.abi > kBackendAbi ? "it needs a newer weft" : "build it again with this weft"));
  const auto same_size = [&](const char* what, std::uint32_t got, std::size_t expected) {
    if (got != expected)
      refuse(file, fmt::format("built with {} bytes of {}; expected {}: its compiler or its options differ",
                               got, what, expected));
  };
  const std::size_t known = kBytesOfMinor[std::min(plugin.abi_minor, kBackendAbiMinor)];
  if (plugin.abi_minor <= kBackendAbiMinor || plugin.bytes < known)
    same_size("BackendPlugin", plugin.bytes, known);
  same_size("OpState", plugin.op_state_bytes, sizeof(OpState));
  same_size("Traits", plugin.traits_bytes, sizeof(Traits));
  same_size("GroupInit", plugin.group_init_bytes, sizeof(GroupInit));
  BackendPlugin copy;
  copy.linked_to = nullptr;
  std::memcpy(static_cast<void*>(&copy), &plugin, known);
  return copy;
}

// Returns why the file is no complete shared object. Empty: dlopen() may open it. The check is needed because
// dlopen() waits for the writer of a FIFO, and maps truncated files, so that the process ends with SIGBUS at
// the first missing page.
std::string why_not_whole(const std::string& path) {
  const RegularFile file = open_regular_file(path);
  if (!file.fd) return file.why;
  const auto read_at = [&](auto& to, std::uint64_t at) {
    return ::pread(file.fd.get(), &to, sizeof to, static_cast<off_t>(at)) == static_cast<ssize_t>(sizeof to);
  };
  ElfW(Ehdr) head;
  if (!read_at(head, 0) || std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 ||
      head.e_phentsize != sizeof(ElfW(Phdr)))
    return {};  // a file for another machine, or no library at all: dlopen() reports that
  const auto bytes = static_cast<std::uint64_t>(file.bytes);
  for (unsigned i = 0; i < head.e_phnum; ++i) {
    ElfW(Phdr) part;
    const bool there = read_at(part, head.e_phoff + i * sizeof part);
    if (there &&
        (part.p_type != PT_LOAD || (part.p_offset <= bytes && part.p_filesz <= bytes - part.p_offset)))
      continue;
    return fmt::format("it is truncated: it has {} bytes; its segments need more", bytes);
  }
  return {};
}

// Loads the plug-in in a file. Throws unsupported if that fails.
BackendPlugin load(const std::string& file, std::string_view name) {
  if (const std::string why = why_not_whole(file); !why.empty()) refuse(file, "cannot be loaded: " + why);
  void* const object = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (object == nullptr) {
    std::string why = ::dlerror();
    if (why.starts_with(file + ": ")) why.erase(0, file.size() + 2);
    why = why.find("failed to map segment") != std::string::npos  // the loader leaves out why
              ? fmt::format("{}: {}", why, system_words(ENOMEM))
              : with_limits(why);
    refuse(file, "cannot be loaded: " + why);
  }
  // Before any function of the plug-in is called, looks for libweft in the objects that the plug-in needs.
  // The plug-in may be bound to a third libweft, whose symbols are global in the process (RTLD_GLOBAL). Its
  // own `linked_to` shows that.
  if (const void* const needed = ::dlsym(object, "weft_version"); needed != nullptr)
    expect_bound_to_this_weft(file, needed);
  const auto entry = reinterpret_cast<const BackendPlugin* (*)()>(::dlsym(object, kEntry));
  if (entry == nullptr) refuse(file, fmt::format("has no function {}()", kEntry));
  const BackendPlugin* const plugin = call_plugin(file, kEntry, entry);
  if (plugin == nullptr) refuse(file, fmt::format("{}() gave null", kEntry));
  const BackendPlugin usable = compatible(file, *plugin);
  if (usable.linked_to != nullptr) expect_bound_to_this_weft(file, usable.linked_to);
  if (usable.name == nullptr || usable.name != name)
    refuse(file, fmt::format("says its name is \"{}\"; expected \"{}\"", usable.name ? usable.name : "(null)",
                             name));
  if (usable.make == nullptr) refuse(file, "has no function make");
  if (usable.traits == nullptr) refuse(file, "has no function traits");
  return usable;
}

// The plug-ins of a Context, by file name. A file that was refused is tried again, because it may have been
// replaced.
class LoadedPlugins {
 public:
  explicit LoadedPlugins(Context& context) : log_(context.log()) {}

  const BackendPlugin& get(const std::string& file, std::string_view name) {
    struct Flush {
      Logger& log;
      ~Flush() { log.flush(); }
    };
    const Flush unlocked{log_};
    const std::lock_guard lock(mutex_);
    if (const auto found = plugins_.find(file); found != plugins_.end()) return found->second;
    const BackendPlugin& plugin = plugins_.emplace(file, load(file, name)).first->second;
    log_.write_later(
        LogLayer::backends, LogLevel::info,
        fmt::format("backend \"{}\" ({}) is {}", name, plugin.version ? plugin.version : "", file));
    return plugin;
  }

 private:
  Logger& log_;
  std::mutex mutex_;
  std::map<std::string, BackendPlugin> plugins_;
};

std::string obstacle(const std::string& file, const BackendPlugin& plugin) {
  return plugin.obstacle == nullptr ? std::string() : call_plugin(file, "obstacle", plugin.obstacle);
}

bool may_be_a_name(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

}  // namespace

const void* linked_weft() noexcept {
  static constexpr char kHere = 0;
  return &kHere;
}

std::vector<std::string> backend_folders() {
  std::vector<std::string> folders;
  const auto add = [&](const std::string& folder) {
    if (!folder.empty() && std::find(folders.begin(), folders.end(), folder) == folders.end())
      folders.push_back(folder);
  };
  std::string_view path;
  const auto set = env::get("WEFT_BACKEND_PATH");
  if (set) path = *set;
  while (!path.empty()) {
    const auto end = std::min(path.find(':'), path.size());
    add(std::string(path.substr(0, end)));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  if (const std::string own = own_folder(); !own.empty()) {
    add(own);
    add(own + "/weft");
  }
  return folders;
}

namespace {

struct FoundPlugin {
  std::string file;
  const BackendPlugin& plugin;
};

FoundPlugin find_plugin(Context& context, std::string_view name) {
  if (!may_be_a_name(name))
    throw Error(ErrorCode::bad_argument,
                fmt::format("backend \"{}\" is no name; expected letters, digits, '-' and '_'", name));
  if (!has_plugins())
    throw Error(
        ErrorCode::unsupported,
        fmt::format("backend \"{}\" cannot be loaded: this program has weft in itself (libweft.a), and "
                    "plug-ins need the libweft.so that they share with the program; link weft::weft",
                    name));
  const std::vector<std::string> folders = backend_folders();
  for (const std::string& folder : folders) {
    const std::string file = file_of(folder, name);
    if (!exists(file)) continue;
    const BackendPlugin& plugin = context.attached<LoadedPlugins>().get(file, name);
    if (const std::string why = obstacle(file, plugin); !why.empty())
      refuse(file, "cannot be used here: " + why);
    return {file, plugin};
  }
  throw Error(
      ErrorCode::unsupported,
      fmt::format(
          "backend \"{}\" was not found: it is not built in (\"shm\" and \"auto\" are), and there is no "
          "{}{}{} in {}",
          name, kPrefix, name, kSuffix, fmt::join(folders, ", ")));
}

// Programs read the plug-in's traits before a group exists. The group uses the traits of its transport. Both
// must be equal, except for traits that depend on the group: spin, rings, the device, and whether deaths are
// detected, which may need all ranks on one host.
void expect_same_traits(const std::string& file, const Traits& before, const Traits& group) {
  FailureGuarantees guarantees = group.guarantees;
  guarantees.detects_death = before.guarantees.detects_death;
  const char* const field = before.name != group.name                                 ? "name"
                            : before.ops != group.ops                                 ? "ops"
                            : before.dtypes != group.dtypes                           ? "dtypes"
                            : before.reduces != group.reduces                         ? "reduces"
                            : before.native_is_canonical != group.native_is_canonical ? "native_is_canonical"
                            : before.device != group.device                           ? "device"
                            : before.progress != group.progress                       ? "progress"
                            : !(before.guarantees == guarantees)                      ? "guarantees"
                                                                                      : nullptr;
  if (field != nullptr)
    refuse(file,
           fmt::format("Traits::{} of the plug-in's traits() are not those of its Backend::traits()", field));
}

}  // namespace

BackendFactory load_backend(Context& context, std::string_view name) {
  if (name == "shm") return make_shm_backend;
  if (name == "auto") return make_auto_backend;
  const FoundPlugin found = find_plugin(context, name);
  const bool own = known_traits(name) != nullptr;  // weft's own plug-ins compare their builds in join()
  return [file = found.file, plugin = found.plugin, own](const GroupInit& b) {
    if (!own) compare_builds(b);
    std::unique_ptr<Backend> made = plugin.make(b);
    if (made != nullptr && !own)
      expect_same_traits(file, call_plugin(file, "traits", plugin.traits), made->traits());
    return as_built_for(plugin.abi_minor, std::move(made));
  };
}

Traits backend_traits(Context& context, std::string_view name) {
  if (const Traits* const known = known_traits(name)) return *known;
  const FoundPlugin found = find_plugin(context, name);
  Traits traits = call_plugin(found.file, "traits", found.plugin.traits);
  traits.ops &= ~ops_after(found.plugin.abi_minor);
  return traits;
}

std::vector<FoundBackend> find_backends(Context& context) {
  std::vector<FoundBackend> found{{.name = "shm", .path = "built in", .version = "", .problem = ""}};
  if (!has_plugins()) return found;
  for (const std::string& folder : backend_folders()) {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
      const std::string file = it->path().filename().string();
      if (file.size() > kPrefix.size() + kSuffix.size() && file.starts_with(kPrefix) &&
          file.ends_with(kSuffix))
        names.push_back(file.substr(kPrefix.size(), file.size() - kPrefix.size() - kSuffix.size()));
    }
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      if (std::any_of(found.begin(), found.end(), [&](const FoundBackend& b) { return b.name == name; }))
        continue;
      FoundBackend b{.name = name, .path = file_of(folder, name), .version = "", .problem = ""};
      try {
        const BackendPlugin& plugin = context.attached<LoadedPlugins>().get(b.path, name);
        b.version = plugin.version ? plugin.version : "";
        b.problem = obstacle(b.path, plugin);
      } catch (const Error& e) {
        b.problem = e.what();
      }
      found.push_back(std::move(b));
    }
  }
  return found;
}

}  // namespace weft
