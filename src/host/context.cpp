#include "weft/host/context.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/cpu/isa.hpp"
#include "host/arena.hpp"
#include "host/cpu_device.hpp"
#include "host/dependents.hpp"
#include "host/local_memory.hpp"
#include "host/peers.hpp"
#include "host/progress_engine.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// The levels that the program has set, changed by WEFT_LOG, which takes precedence.
LogLevels log_levels(const ContextOptions& options) {
  LogLevels levels(options.log_level);
  if (!options.log_levels.empty()) levels = levels.changed_by(options.log_levels, "context: log_levels");
  const auto text = env::get("WEFT_LOG");
  return text ? levels.changed_by(*text, "WEFT_LOG") : levels;
}

// small enough that rounding up to pages does not overflow
constexpr std::size_t kMostSegmentBytes = std::size_t{1} << 62;

ContextOptions checked(ContextOptions options) {
  (void)cpu_isa();  // called here, because kernels that call it later cannot throw
  if (options.segment_bytes == 0)
    throw Error(ErrorCode::bad_argument, "context: segment_bytes is 0; expected at least 1");
  if (options.segment_bytes > kMostSegmentBytes)
    throw Error(ErrorCode::bad_argument,
                fmt::format("context: segment_bytes is {}; expected at most 2^62 = {}", options.segment_bytes,
                            kMostSegmentBytes));
  const Allocator& a = options.allocator;
  if ((a.allocate == nullptr) != (a.deallocate == nullptr))
    throw Error(ErrorCode::bad_argument,
                fmt::format("context: allocator.{} is null; expected a function, since allocator.{} is one",
                            a.allocate == nullptr ? "allocate" : "deallocate",
                            a.allocate == nullptr ? "deallocate" : "allocate"));
  return options;
}

// A variable that nobody reads is most likely a misspelt known variable. The environment belongs to the
// process, so only its first Context checks it.
void warn_of_unknown_variables(Logger& log) {
  static std::atomic_flag looked = ATOMIC_FLAG_INIT;
  if (looked.test_and_set()) return;
  for (const env::Unknown& v : env::unknown_variables())
    log.write(LogLayer::host, LogLevel::warning,
              fmt::format("the environment has {}, which weft does not know{}; see docs/environment.md",
                          v.name, v.nearest.empty() ? "" : fmt::format(" (is {} meant?)", v.nearest)));
}

std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

// A page that holds a 1 in this process. The kernel clears it in every child made by fork, so the check costs
// one load.
class ForkMark {
 public:
  explicit ForkMark(Logger& log) {
    void* page = ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw_errno("context: no page for the fork guard", errno);
    mark_ = static_cast<unsigned char*>(page);
    *mark_ = 1;
    if (::madvise(page, page_bytes(), MADV_WIPEONFORK) != 0)
      log.write(LogLayer::host, LogLevel::info,
                "no fork guard: this kernel cannot clear a page in children (MADV_WIPEONFORK)");
  }
  ~ForkMark() { ::munmap(mark_, page_bytes()); }
  ForkMark(const ForkMark&) = delete;
  ForkMark& operator=(const ForkMark&) = delete;
  const volatile unsigned char* get() const { return mark_; }

 private:
  unsigned char* mark_;
};

}  // namespace

struct Context::Impl {
  explicit Impl(ContextOptions o)
      : options(checked(std::move(o))),
        log(log_levels(options), options.log_sink),
        fork_mark(log),
        local_memory(options.allocator, log),
        arena(log, options.segment_bytes),
        host_peers(log, arena),
        process(::getpid()) {
    attachments.emplace_back(typeid(Dependents), std::shared_ptr<void>(std::shared_ptr<void>(), &dependents));
    warn_of_unknown_variables(log);
  }
  ~Impl() {
    while (!attachments.empty()) attachments.pop_back();
    expect_no_dependents();
  }

  // If such objects exist, they refer to this Context. To continue would cause a crash, or worse, later and
  // elsewhere.
  void expect_no_dependents() const {
    const std::string text = dependents.text();
    if (text.empty()) return;
    fmt::print(stderr,
               "weft: context: destroyed before {}; expected the Context to exist longer than all objects "
               "that were made with it (in a class, declare the Context before its groups and tensors)\n",
               text);
    std::fflush(stderr);
    std::abort();
  }

  const ContextOptions options;
  Logger log;
  ForkMark fork_mark;
  LocalMemory local_memory;
  CpuDevice cpu{local_memory};
  Arena arena;
  HostPeers host_peers;
  const pid_t process;
  Dependents dependents;

  std::mutex progress_mutex;
  std::map<int, std::unique_ptr<ProgressEngine>> progress;  // by process_rank

  std::mutex devices_mutex;
  std::vector<std::unique_ptr<DeviceRuntime>> devices;  // in addition to the CPU

  std::recursive_mutex attachments_mutex;  // recursive, because making an attachment may request another one
  int attachments_being_made = 0;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> attachments;
};

Context::Context(ContextOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))), fork_mark_(impl_->fork_mark.get()) {}

Context::~Context() {
  // In a forked child nothing here belongs to the child. Threads do not exist, locks may be held forever, and
  // shared memory is not mapped (other memory may be at its address). So the child does not touch anything.
  if (forked()) static_cast<void>(impl_.release());
}

Logger& Context::log() noexcept { return impl_->log; }
const ContextOptions& Context::options() const noexcept { return impl_->options; }

class detail::ContextAccess {
 public:
  static Context::Impl& impl(Context& context) noexcept { return *context.impl_; }
};

Arena& arena_of(Context& context) noexcept { return detail::ContextAccess::impl(context).arena; }
LocalMemory& local_memory_of(Context& context) noexcept {
  return detail::ContextAccess::impl(context).local_memory;
}
HostPeers& host_peers_of(Context& context) noexcept {
  return detail::ContextAccess::impl(context).host_peers;
}

ProgressEngine& progress_of(Context& context, int process_rank) {
  if (process_rank < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("context: process_rank is {}; expected 0 or more", process_rank));
  auto& of = detail::ContextAccess::impl(context);
  const std::lock_guard lock(of.progress_mutex);
  auto& list = of.progress[process_rank];
  if (!list) list = std::make_unique<ProgressEngine>(of.host_peers.own_doorbell(process_rank), of.log);
  return *list;
}

void Context::add_device(std::unique_ptr<DeviceRuntime> runtime) {
  if (runtime == nullptr)
    throw Error(ErrorCode::bad_argument, "context: add_device: runtime is null; expected a DeviceRuntime");
  const Device device = runtime->device();
  const std::lock_guard lock(impl_->devices_mutex);
  bool known = device == Device{};
  for (const auto& other : impl_->devices) known |= other->device() == device;
  if (known)
    throw Error(ErrorCode::bad_argument,
                fmt::format("context: device {} is in it already; expected another", to_string(device)));
  impl_->devices.push_back(std::move(runtime));
}

DeviceRuntime& Context::device(Device device) {
  if (device == Device{}) return impl_->cpu;
  const std::lock_guard lock(impl_->devices_mutex);
  std::string known = "cpu";
  for (const auto& runtime : impl_->devices) {
    if (runtime->device() == device) return *runtime;
    known += ", " + to_string(runtime->device());
  }
  throw Error(ErrorCode::unsupported,
              fmt::format("device {} is not in this Context, which has {}; Context::add_device adds one",
                          to_string(device), known));
}

void* Context::attachment(std::type_index type, std::shared_ptr<void> (*make)(Context&)) {
  void* made = nullptr;
  bool unlocked = false;
  {
    const std::lock_guard lock(impl_->attachments_mutex);
    for (const auto& [key, object] : impl_->attachments)
      if (key == type) return object.get();
    struct Making {
      int& count;
      explicit Making(int& c) : count(c) { ++count; }
      ~Making() { --count; }
    };
    std::shared_ptr<void> object;
    {
      const Making making(impl_->attachments_being_made);
      object = make(*this);
    }
    impl_->attachments.emplace_back(type, object);
    made = object.get();
    unlocked = impl_->attachments_being_made == 0;
  }
  if (unlocked) impl_->log.flush();  // hands over the waiting lines
  return made;
}

void Context::throw_forked(const char* what) const {
  throw Error(
      ErrorCode::unsupported,
      fmt::format(
          "{}: this process was forked from process {} after its Context was made; make a new Context "
          "in the child, or fork before the first one",
          what, impl_->process));
}

}  // namespace weft
