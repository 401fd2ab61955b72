// Makes a group: its ranks meet, compare their settings, and make a communicator.
#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <optional>
#include <tuple>

#include "backends/mpi/backend.hpp"
#include "backends/mpi/control_channel.hpp"
#include "backends/mpi/messages.hpp"
#include "backends/mpi/rounds.hpp"
#include "backends/test_hooks.hpp"
#include "base/hash.hpp"
#include "base/parse_number.hpp"
#include "host/cores/usable_cores.hpp"
#include "store/table.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"

namespace weft::mpi {
namespace {

// A digest of the sizes and layouts that must be equal on all ranks.
constexpr std::uint64_t kLayout =
    digest_of(sizeof(Envelope), offsetof(Envelope, kind), offsetof(Envelope, dtype),
              offsetof(Envelope, eager), offsetof(Envelope, tag), offsetof(Envelope, number),
              offsetof(Envelope, payload), offsetof(Envelope, count), static_cast<int>(Envelope::pong),
              ControlChannel::kPayload, ControlChannel::kTag, ControlChannel::kNumbers, Messages::kEager,
              Messages::kPieceBytes, Rounds::kStageBytes, Rounds::kLeastBlockBytes);

constexpr int kMostTag = 32767;  // every MPI has tags up to this value

// The information that each rank publishes through the store.
struct BootstrapInfo {
  std::string backend;
  int world_rank = -1, world_size = 0, safe = 1, check = 1;
  std::int64_t max_count = 0;
  // Rank 0 chooses this number, which differs for every group of the job. So groups that share ranks and are
  // made at the same time by several threads are not mixed up.
  int tag = 0;
  CpuShare cores;

  std::string encode() const {
    return fmt::format("{} {} {} {} {} {} {} {}", backend, world_rank, world_size, safe, check, max_count,
                       tag, cores.encode());
  }
  /// Returns nothing if the text is no such info.
  static std::optional<BootstrapInfo> decode(std::string_view text) {
    BootstrapInfo info;
    info.backend = next_word(text);
    const auto take = [&text](auto& number, auto min, auto max) {
      const auto is = next_integer<std::remove_reference_t<decltype(number)>>(text, min, max);
      number = is.value_or(number);
      return is.has_value();
    };
    const bool whole = take(info.world_rank, 0, INT_MAX) && take(info.world_size, 1, INT_MAX) &&
                       take(info.safe, 0, 1) && take(info.check, 0, 1) &&
                       take(info.max_count, 0, INT64_MAX) && take(info.tag, 0, kMostTag);
    if (!whole || info.world_rank >= info.world_size) return std::nullopt;
    info.cores = CpuShare::decode(std::string(text));
    return info;
  }
};

[[noreturn]] void refuse(const GroupInit& b, ErrorCode code, const std::string& text,
                         std::vector<int> ranks) {
  throw Error(Failure{.code = code,
                      .text = fmt::format("group \"{}\": {} [rank {}]", b.name, text, b.rank),
                      .ranks = std::move(ranks)});
}

std::vector<BootstrapInfo> exchange(const GroupInit& b, const BootstrapInfo& own) {
  std::vector<BootstrapInfo> infos;
  for (const std::string& text : join(b, "mpi/info", own.encode(), kLayout)) {
    const int r = static_cast<int>(infos.size());
    auto info = BootstrapInfo::decode(text);
    if (!info)
      refuse(b, ErrorCode::mismatch,
             fmt::format("rank {} wrote {}, which is no rank's info", r, shown_key(text)), {r});
    infos.push_back(std::move(*info));
  }
  for (int r = 0; r < b.size; ++r) {
    const BootstrapInfo& info = infos[static_cast<std::size_t>(r)];
    const std::vector<int> both{std::min(r, b.rank), std::max(r, b.rank)};
    if (info.backend != own.backend)
      refuse(b, ErrorCode::mismatch,
             fmt::format("rank {} uses {}, rank {} {}", r, info.backend, b.rank, own.backend), both);
    for (const auto& [variable, theirs, mine] : {std::tuple{"WEFT_MPI_SAFE_BUFFERS", info.safe, own.safe},
                                                 std::tuple{"WEFT_MPI_CHECK", info.check, own.check}})
      if (theirs != mine)
        refuse(b, ErrorCode::mismatch,
               fmt::format("{} is {} on rank {}, {} on rank {}; expected the same on all ranks", variable,
                           theirs ? "on" : "off", r, mine ? "on" : "off", b.rank),
               both);
    if (info.max_count != own.max_count)
      refuse(b, ErrorCode::mismatch,
             fmt::format("rank {} counts to {}, rank {} to {}", r, info.max_count, b.rank, own.max_count),
             both);
    for (int other = 0; other < r; ++other)
      if (infos[static_cast<std::size_t>(other)].world_rank == info.world_rank)
        refuse(
            b, ErrorCode::unsupported,
            fmt::format("ranks {} and {} are both process {} of an MPI_COMM_WORLD of {}; over {}, ranks are "
                        "processes that one mpirun of {} has started",
                        other, r, info.world_rank, info.world_size, kBackend, kLibrary),
            {other, r});
  }
  return infos;
}

int next_tag(const GroupInit& b) {
  try {
    return static_cast<int>(b.store->add(fmt::format("weft/{}/groups", kBackend), 1, b.deadline) %
                            (kMostTag + 1));
  } catch (const Error& e) {
    refuse(b, e.code(), e.what(), {});
  }
}

// A communicator that is being made. The object may exist longer than the call that requested it.
struct Making {
  std::vector<int> world_ranks;
  int tag = 0;
  std::string error;
  MPI_Comm comm = MPI_COMM_NULL;

  void run() {
    try {
      MPI_Group world, group;
      must(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
      must(MPI_Group_incl(world, static_cast<int>(world_ranks.size()), world_ranks.data(), &group),
           "MPI_Group_incl");
      must(MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &comm), "MPI_Comm_create_group");
      MPI_Group_free(&group);
      MPI_Group_free(&world);
    } catch (const Error& e) {
      error = e.what();
    }
  }
};

MPI_Comm make_comm(const GroupInit& b, Process& process, const std::vector<BootstrapInfo>& infos) {
  const auto making = std::make_shared<Making>();
  for (const BootstrapInfo& info : infos) making->world_ranks.push_back(info.world_rank);
  making->tag = infos[0].tag;
  // MPI_Comm_create_group blocks. If MPI does not allow several threads, the call cannot run in a separate
  // thread, which could be left behind. Groups with common ranks must then be made in one order.
  if (!process.multiple()) {
    const auto turn = process.lock();
    making->run();
  } else if (!run_until(b.deadline, [making] { making->run(); })) {
    process.poison();
    refuse(b, ErrorCode::timeout, "all ranks arrived, but MPI_Comm_create_group did not end by the deadline",
           {});
  }
  if (!making->error.empty()) refuse(b, ErrorCode::system, making->error, {});
  return making->comm;
}

std::unique_ptr<Backend> make(const GroupInit& b) {
  Settings settings{.safe = env::is_on("WEFT_MPI_SAFE_BUFFERS"), .check = env::is_on("WEFT_MPI_CHECK")};
  settings.unexpected = UnexpectedLimits::from_env();
  if (const auto most = test_hooks(b).max_count; most > 0) settings.max_count = most;
  // MPI_Init_thread waits for all processes of the job, and cannot say for which process it waits.
  if (b.size > 1) {
    if (Process::initialised())
      announce(b, "mpi/here", {}, kLayout);
    else
      join(b, "mpi/here", {}, kLayout);
  }
  Process& process = Process::join(b.context.log(), b.deadline);
  if (const std::string why = process.refuses_thread(); !why.empty())
    refuse(b, ErrorCode::unsupported, why, {});
  {
    const auto turn = process.lock();
    process.reap();
  }
  MPI_Comm comm = MPI_COMM_NULL;
  CpuShare cores = CpuShare::usable();
  if (b.size == 1) {
    const auto turn = process.lock();
    must(MPI_Comm_dup(MPI_COMM_SELF, &comm), "MPI_Comm_dup");
  } else {
    BootstrapInfo own{.backend = kBackend,
                      .world_rank = process.world_rank(),
                      .world_size = process.world_size(),
                      .safe = settings.safe,
                      .check = settings.check,
                      .max_count = settings.max_count,
                      .cores = cores};
    if (b.rank == 0) own.tag = next_tag(b);
    const std::vector<BootstrapInfo> infos = exchange(b, own);
    // the infos may be of several hosts, whose ranks are bound in the same way
    for (const BootstrapInfo& info : infos) cores |= info.cores;
    comm = make_comm(b, process, infos);
    withdraw(b, "mpi/here");  // all have entered MPI_Comm_create_group
    withdraw(b, "mpi/info");
  }
  settings.cores = cores.count();
  const auto turn = process.lock();
  must(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return make_backend(b, process, comm, settings);
}

}  // namespace
}  // namespace weft::mpi

WEFT_BACKEND_PLUGIN {
  static const weft::BackendPlugin plugin{.name = weft::mpi::kBackend,
                                          .version = weft::mpi::kBuiltFor,
                                          .make = weft::mpi::make,
                                          .traits = [] { return *weft::known_traits(weft::mpi::kBackend); },
                                          .obstacle = weft::mpi::obstacle};
  return &plugin;
}
