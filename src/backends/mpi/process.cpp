#include "backends/mpi/process.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <string_view>
#include <thread>

#include "backends/mpi/control_channel.hpp"
#include "base/signals.hpp"
#include "base/waits/suspension.hpp"
#include "reduce/reduce.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"

namespace weft::mpi {

#define WEFT_TEXT_(x) #x
#define WEFT_TEXT(x) WEFT_TEXT_(x)
#if defined(OPEN_MPI)
const char* const kBuiltFor = "Open MPI " WEFT_TEXT(OMPI_MAJOR_VERSION) "." WEFT_TEXT(
    OMPI_MINOR_VERSION) "." WEFT_TEXT(OMPI_RELEASE_VERSION);
const char* const kLibrary = "Open MPI";
const char* const kBackend = "mpi-openmpi";
constexpr const char* kOther = "MPICH";
constexpr const char* kLibraryText = "Open MPI v";  // how MPI_Get_library_version() begins
#elif defined(MPICH)
const char* const kBuiltFor = "MPICH " MPICH_VERSION;
const char* const kLibrary = "MPICH";
const char* const kBackend = "mpi-mpich";
constexpr const char* kOther = "Open MPI";
constexpr const char* kLibraryText = "MPICH Version:";
#else
#error "this mpi.h is neither Open MPI's nor MPICH's"
#endif
#undef WEFT_TEXT
#undef WEFT_TEXT_

namespace {

constexpr auto kFarewell = std::chrono::seconds(2);  // how long the exit waits for peers to leave groups
// how long weft tries to send a failure to peers that do not poll
constexpr auto kDelivery = std::chrono::minutes(5);
constexpr auto kCarryNap = std::chrono::milliseconds(20);
// How long leaving a group waits for MPI to take its control messages.
constexpr auto kControlDelivery = std::chrono::seconds(2);

// Returns the text of the library's version. The buffer is large enough for both libraries, because the
// symbol may belong to the other one.
std::string library_text() {
  char text[65536] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  return text;
}

/// The MPI libraries that this process has loaded, recognised by the names of their files.
struct Loaded {
  std::string other;     // the path of the other MPI
  bool sibling = false;  // weft's plug-in for the other MPI is loaded, and may have loaded that MPI
};

// The file of Debian's MPICH is libmpich.so.12. The file of upstream's MPICH and its relatives is
// libmpi.so.12. The file of Open MPI is libmpi.so.40.
bool is_other(std::string_view file) noexcept {
#if defined(OPEN_MPI)
  return file.starts_with("libmpich.so") || file.starts_with("libmpi.so.12");
#else
  return file.starts_with("libmpi.so.") && !file.starts_with("libmpi.so.12");
#endif
}

Loaded loaded() {
  Loaded found;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* out) {
        auto& f = *static_cast<Loaded*>(out);
        const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const std::string_view file = path.substr(path.rfind('/') + 1);
        if (f.other.empty() && is_other(file)) f.other = path;
        if (file.starts_with("libweft_backend_mpi-") && file.find(kBackend) == std::string_view::npos)
          f.sibling = true;
        return 0;
      },
      &found);
  return found;
}

// Asks the other MPI library whether it is initialised.
bool is_initialised(const std::string& library) {
  void* const handle = ::dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  const auto ask = reinterpret_cast<int (*)(int*)>(::dlsym(handle, "MPI_Initialized"));
  int yes = 0;
  if (ask != nullptr) ask(&yes);
  ::dlclose(handle);
  return yes != 0;
}

// weft's own kernels perform reductions that MPI does not define, or that a library performs wrongly. Min and
// max of floats: MPI does not define the quiet NaN and the order of -0 and +0. (They are exact, so any order
// of combination gives the same bits.) Min and max of unsigned integers: MPICH 4.0 compares these integers as
// signed. Sums and products of 8 and 16 bits: Open MPI 4.1's vector code saturates, but weft's sums wrap.
template <ReduceOp::Kind kKind>
void combine(void* in, void* inout, int* count, MPI_Datatype* type) {
  DType dtype = DType::f64;
  for (int d = 0; d < kDTypeCount; ++d)
    if (value_type(static_cast<DType>(d)) == *type) dtype = static_cast<DType>(d);
  if (dtype == DType::boolean) dtype = DType::u8;  // both have the same MPI type, and the same result
  const std::byte* const ins[] = {static_cast<const std::byte*>(in), static_cast<const std::byte*>(inout)};
  std::byte* const out = static_cast<std::byte*>(inout);
  reduce(dtype, ReduceOp{kKind}, ins, {&out, 1}, *count);
}

}  // namespace

std::string obstacle() {
  const Loaded found = loaded();
  // the other library is linked, and its symbols come first
  const bool linked = !library_text().starts_with(kLibraryText);
  if (!linked && (found.other.empty() || (found.sibling && !is_initialised(found.other)))) return {};
  return fmt::format("the program already carries {}{}; {} needs {}, and a process can have one MPI only",
                     kOther, found.other.empty() ? "" : fmt::format(" ({})", found.other), kBackend,
                     kLibrary);
}

void must(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0, kind = MPI_ERR_UNKNOWN;
  MPI_Error_string(code, text, &length);
  MPI_Error_class(code, &kind);
  ErrorCode what = ErrorCode::system;
#if defined(MPIX_ERR_PROC_FAILED)
  if (kind == MPIX_ERR_PROC_FAILED) what = ErrorCode::peer_lost;
#endif
  throw Error(what, fmt::format("{}: {}", function, text));
}

MPI_Datatype bytes_type(DType t) noexcept {
  switch (size_bytes(t)) {
    case 16: return MPI_C_DOUBLE_COMPLEX;
    case 8: return MPI_INT64_T;
    case 4: return MPI_INT32_T;
    case 2: return MPI_INT16_T;
  }
  return MPI_BYTE;
}

MPI_Datatype value_type(DType t) noexcept {
  switch (t) {
    case DType::f64: return MPI_DOUBLE;
    case DType::f32: return MPI_FLOAT;
    case DType::i8: return MPI_INT8_T;
    case DType::i16: return MPI_INT16_T;
    case DType::i32: return MPI_INT32_T;
    case DType::i64: return MPI_INT64_T;
    case DType::boolean:
    case DType::u8: return MPI_UINT8_T;
    case DType::u16: return MPI_UINT16_T;
    case DType::u32: return MPI_UINT32_T;
    case DType::u64: return MPI_UINT64_T;
    case DType::c64: return MPI_C_FLOAT_COMPLEX;
    case DType::c128: return MPI_C_DOUBLE_COMPLEX;
    case DType::f16:
    case DType::bf16:
    case DType::f8e4m3:
    case DType::f8e5m2: break;  // these dtypes are only moved
  }
  return MPI_DATATYPE_NULL;
}

bool run_until(Deadline deadline, std::function<void()> f) {
  struct Run {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
  };
  const auto run = std::make_shared<Run>();
  {
    const NoSignals inherited;
    std::thread([run, f = std::move(f)] {
      f();
      const std::lock_guard guard(run->mutex);
      run->ended = true;
      run->changed.notify_all();
    }).detach();
  }
  std::unique_lock guard(run->mutex);
  const auto ended = [&] { return run->ended; };
  while (!ended() && !deadline.passed()) {
    const Duration piece = std::min(deadline.left(), wait_piece());
    const TimedWait wait(piece);
    run->changed.wait_for(guard, piece, ended);
  }
  return ended();
}

bool Process::initialised() noexcept {
  int yes = 0;
  MPI_Initialized(&yes);
  return yes != 0;
}

Process& Process::join(Logger& log, Deadline deadline) {
  static std::mutex mutex;
  static Process* the_process = nullptr;  // never destroyed: groups may end after main
  const std::lock_guard guard(mutex);
  if (the_process != nullptr) return *the_process;
  if (const std::string why = obstacle(); !why.empty()) throw Error(ErrorCode::unsupported, why);
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (finalised)
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: the program has called MPI_Finalize; MPI cannot start again", kBackend));
  the_process = new Process(log, deadline);
  return *the_process;
}

Process::Process(Logger& log, Deadline deadline) {
  if (initialised()) {
    must(MPI_Query_thread(&threads_), "MPI_Query_thread");
    if (!multiple())
      log.write_later(LogLayer::backends, LogLevel::info,
                      fmt::format("{}: the program initialised MPI without MPI_THREAD_MULTIPLE; {}", kBackend,
                                  threads_ == MPI_THREAD_SERIALIZED ? "calls from several threads take turns"
                                                                    : "calls come from its thread only"));
  } else {
    static bool begun = false;  // guarded by join()'s lock
    struct Init {
      int code = MPI_SUCCESS, threads = MPI_THREAD_SINGLE;
    };
    const auto init = std::make_shared<Init>();
    if (begun || (begun = true, !run_until(deadline, [init] {
                    init->code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &init->threads);
                  })))
      throw Error(
          ErrorCode::timeout,
          fmt::format("{}: MPI_Init_thread did not end by the deadline; it may wait for every process "
                      "that mpirun started",
                      kBackend));
    must(init->code, "MPI_Init_thread");
    // An MPI without thread support does not notice which thread calls it, as long as only one thread does.
    threads_ = std::max(init->threads, static_cast<int>(MPI_THREAD_SERIALIZED));
    ours_ = true;
    struct Exit {
      Process* process;
      pid_t pid;
    };
    ::on_exit(
        [](int status, void* argument) {
          const std::unique_ptr<Exit> exit(static_cast<Exit*>(argument));
          if (::getpid() == exit->pid) exit->process->finalise(status);
        },
        new Exit{this, ::getpid()});
  }
  must(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank_), "MPI_Comm_rank");
  must(MPI_Comm_size(MPI_COMM_WORLD, &world_size_), "MPI_Comm_size");
  must(MPI_Op_create(combine<ReduceOp::Kind::min>, 1, &min_), "MPI_Op_create");
  must(MPI_Op_create(combine<ReduceOp::Kind::max>, 1, &max_), "MPI_Op_create");
  must(MPI_Op_create(combine<ReduceOp::Kind::sum>, 1, &sum_), "MPI_Op_create");
  must(MPI_Op_create(combine<ReduceOp::Kind::prod>, 1, &prod_), "MPI_Op_create");
}

bool Process::alive() noexcept {
  int finalised = 0;
  MPI_Finalized(&finalised);
  return finalised == 0;
}

std::string Process::refuses_thread() const {
  if (threads_ >= MPI_THREAD_SERIALIZED) return {};
  int main = 0;
  MPI_Is_thread_main(&main);
  if (main) return {};
  return fmt::format(
      "the program initialised MPI for one thread, and this is another; {} with several "
      "threads needs MPI_Init_thread(MPI_THREAD_MULTIPLE)",
      kBackend);
}

std::unique_lock<std::mutex> Process::lock() {
  return multiple() ? std::unique_lock<std::mutex>() : std::unique_lock(calls_);
}

MPI_Op Process::op(ReduceOp::Kind kind, DType dtype) const noexcept {
  switch (kind) {
    case ReduceOp::Kind::sum: return size_bytes(dtype) <= 2 ? sum_ : MPI_SUM;
    case ReduceOp::Kind::prod: return size_bytes(dtype) <= 2 ? prod_ : MPI_PROD;
    case ReduceOp::Kind::min: return min_;
    case ReduceOp::Kind::max: return max_;
    case ReduceOp::Kind::bit_and: return MPI_BAND;
    case ReduceOp::Kind::bit_or: return MPI_BOR;
    case ReduceOp::Kind::bit_xor: return MPI_BXOR;
    case ReduceOp::Kind::logical_and: return MPI_LAND;
    case ReduceOp::Kind::logical_or: return MPI_LOR;
    case ReduceOp::Kind::logical_xor: return MPI_LXOR;
    case ReduceOp::Kind::avg:
    case ReduceOp::Kind::premul_sum:
    case ReduceOp::Kind::user: break;  // composed
  }
  return MPI_OP_NULL;
}

void Process::poison() noexcept {
  const std::lock_guard guard(mutex_);
  poisoned_ = true;
}

// First waits a limited time until MPI has taken the control messages. MPI sends pending messages only while
// it is called, and the program may not call it for a long time. Peers would then wait for control messages
// of a rank whose call is done. (A stopped peer takes no messages.)
void Process::defer_free(std::unique_ptr<ControlChannel> channel) {
  for (const Deadline limit = Deadline::after(kControlDelivery);
       !channel->idle() && channel->owes() && !limit.passed();)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  {
    const std::lock_guard guard(mutex_);
    deferred_.push_back(std::move(channel));
  }
  reap();
}

void Process::reap() noexcept {
  const std::lock_guard guard(mutex_);
  std::erase_if(deferred_, [](const std::unique_ptr<ControlChannel>& channel) { return channel->idle(); });
}

void Process::deliver(ControlChannel& channel) {
  if (!multiple() || !ours_) return;
  const std::lock_guard guard(mutex_);
  if (ending_) return;
  undelivered_.push_back({&channel, Deadline::after(kDelivery)});
  if (delivering_) return;
  const NoSignals inherited;
  std::thread([this] { deliver_undelivered(); }).detach();
  delivering_ = true;
}

void Process::deliver_undelivered() noexcept {
  const auto is_over = [](const Undelivered& u) {
    if (u.limit.passed()) return true;
    try {
      u.channel->take([](int, const Envelope&, std::span<const std::byte>) {});
      return !u.channel->owes();
    } catch (...) {  // MPI has lost a rank
      return true;
    }
  };
  for (Duration nap = std::chrono::milliseconds(1);; nap = std::min<Duration>(2 * nap, kCarryNap)) {
    std::this_thread::sleep_for(nap);
    const std::lock_guard guard(mutex_);
    if (ending_ || !alive()) undelivered_.clear();
    std::erase_if(undelivered_, is_over);
    if (!undelivered_.empty()) continue;
    delivering_ = false;
    return;
  }
}

void Process::finalise(int status) noexcept {
  ending_ = true;  // deliver_undelivered() checks it before it calls MPI
  // MPI itself may be ending the process here, from within a call of this thread.
  if (status != 0 || !alive()) return;
  {
    const std::lock_guard guard(mutex_);  // waits for the last call of deliver_undelivered()
    if (poisoned_) return;
  }
  for (const Deadline deadline = Deadline::after(kFarewell); !deadline.passed();) {
    reap();
    if (deferred_.empty()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::unique_ptr<ControlChannel>& channel : deferred_) (void)channel.release();
  MPI_Finalize();
}

}  // namespace weft::mpi
