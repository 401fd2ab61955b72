// A transport in a shared object of its own: `libweft_backend_<name>.so`. weft loads it when a group requests
// <name>.
//
// weft searches for it in the folders of WEFT_BACKEND_PATH (separated by ':'), then in the folder of libweft,
// then in the subfolder `weft` of that folder, which holds weft's own plug-ins. weft loads the first file of
// that name. The object exports one function, weft_backend_plugin(). examples/backend is a complete plug-in;
// docs/backends.md explains how to write one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/backends/backend.hpp"

namespace weft {

/// The version of the interface that a plug-in is built against: the headers of weft/backends and all that
/// they include. The major number changes when something that exists changes. Another major is refused. The
/// minor number grows when something is added: a field at the end of BackendPlugin (6.4: linked_to), a
/// virtual function with a default at the end of Backend (6.3: last_calls and probe; 6.5: plan_exchange), or
/// an operation at the end of Op (6.2: scan and exscan; 6.3: wait_message, and with it recv from any_source;
/// 6.6: exchange, whose boxes may have indices; weft does not call the exchange of a plug-in for 6.5). Older
/// plug-ins do not list a newer operation in their Traits. So weft composes it over them, or reports it as
/// unsupported. weft loads a plug-in that was built for an older minor, and does not use the fields and
/// functions that the plug-in lacks. weft also loads a plug-in that was built for a newer minor, unless the
/// plug-in needs a function that this libweft lacks.
inline constexpr std::uint32_t kBackendAbi = 6;
inline constexpr std::uint32_t kBackendAbiMinor = 6;

/// An address inside the libweft that the caller is linked to, since a process may have loaded several copies
/// of libweft.
const void* linked_weft() noexcept;

/// The description of a plug-in. The fields are ordered by the version that added them. The first field never
/// moves.
struct BackendPlugin {
  // Version 6.0.
  std::uint32_t abi = kBackendAbi;
  std::uint32_t abi_minor = kBackendAbiMinor;
  std::uint32_t bytes = sizeof(BackendPlugin);  ///< fields beyond these bytes count as null
  /// The sizes of the structs in the plug-in's build. Another compiler, or other options, may lay out the
  /// same sources differently. weft then refuses the plug-in.
  std::uint32_t op_state_bytes = sizeof(OpState);
  std::uint32_t traits_bytes = sizeof(Traits);
  std::uint32_t group_init_bytes = sizeof(GroupInit);
  const char* name = "";     ///< NAME in the name of its file, libweft_backend_NAME.so
  const char* version = "";  ///< the version of the transport, to show to users: "Open MPI 4.1.4"
  std::unique_ptr<Backend> (*make)(const GroupInit&) = nullptr;  ///< see BackendFactory
  /// the transport's traits, before a group exists
  Traits (*traits)() = nullptr;
  // Version 6.1.
  /// Returns why the plug-in cannot be used in this process ("the program already carries MPICH …"), or an
  /// empty text if it can be used. A null pointer means that it can always be used. Called at each
  /// load_backend(), so the answer may change.
  std::string (*obstacle)() = nullptr;
  // Version 6.4.
  /// An address in the libweft that the plug-in calls. weft refuses a plug-in that calls another copy of
  /// libweft.
  const void* linked_to = linked_weft();
  // If one of these functions, or weft_backend_plugin(), throws an exception, weft turns it into an Error
  // with the name of the file.
};

/// A plug-in that was found, for `weft doctor`.
struct FoundBackend {
  std::string name, path, version;
  std::string problem;  ///< why it cannot be used; empty: it can
};
/// The built-in transport and all plug-ins in the search path. If several have one name, only the first is in
/// the list. Loads the plug-ins. Thread-safe.
std::vector<FoundBackend> find_backends(Context& context);
/// The folders that are searched for plug-ins, in order.
std::vector<std::string> backend_folders();
/// The factory of the backend `name`: "shm", "auto" or the name of a plug-in. Throws unsupported if there is
/// no such backend, or if it cannot be loaded. The text names the folders that were searched, or the file and
/// its fault. Plug-ins stay loaded until the process ends. Thread-safe.
BackendFactory load_backend(Context& context, std::string_view name);
/// The traits of the backend of that name, before a group exists. Loads the backend unless it is one of
/// known_backends(). Throws the errors of load_backend(). Thread-safe.
Traits backend_traits(Context& context, std::string_view name);

/// The traits of one of weft's own transports ("shm", "gloo", "mpi-openmpi", "mpi-mpich", "nccl"), whether it
/// is present or not. The plug-ins, the docs and the tests share this one table. Null for any other name.
const Traits* known_traits(std::string_view name) noexcept;
std::span<const std::string_view> known_backends() noexcept;
/// The traits of shm if its ranks write through the kernel (WEFT_SINGLE_COPY=push, and the system permits
/// it). They equal shm's row of known_traits(), except for quiesce(). If a peer is stopped in the middle of a
/// copy, quiesce() does not succeed.
const Traits& shm_single_copy_traits() noexcept;

}  // namespace weft

/// The one exported function: `extern "C" const weft::BackendPlugin* weft_backend_plugin()`.
#define WEFT_BACKEND_PLUGIN \
  extern "C" __attribute__((visibility("default"))) const weft::BackendPlugin* weft_backend_plugin()
