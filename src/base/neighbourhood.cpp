#include "base/neighbourhood.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "base/arena.hpp"
#include "base/descriptor_socket.hpp"
#include "base/memfd.hpp"
#include "base/no_signals.hpp"
#include "base/process_state.hpp"
#include "base/suspension.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"

namespace weft {
namespace {

constexpr std::size_t kLineBytes = 64;  // one bell a cache line
constexpr std::size_t kBellsBytes = kLineBytes * Neighbourhood::kMaxIdentities;

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw_errno("neighbourhood: no random bytes for the socket's name", errno);
  std::string text = "weft-";
  for (const unsigned char b : bytes) text += fmt::format("{:02x}", b);
  return text;
}

constexpr std::string_view kUnknownHost = "unknown-";

// The inode of a namespace of this process, or nothing.
std::string namespace_of(const char* path) {
  std::array<char, 64> target{};
  const ssize_t n = ::readlink(path, target.data(), target.size());
  return n > 0 ? std::string(target.data(), static_cast<std::size_t>(n)) : std::string();
}

// Processes with equal text can reach each other's sockets and watch each other's pids. Where the system does
// not tell, the text is random: then nobody else is a neighbour.
std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string pids = namespace_of("/proc/self/ns/pid"), network = namespace_of("/proc/self/ns/net");
  if (boot.empty() || pids.empty() || network.empty()) return std::string(kUnknownHost) + random_name();
  return fmt::format("{}/{}/{}", boot, pids, network);
}

Bell bell_in(std::byte* bells, int identity) {
  if (bells == nullptr || identity < 0 || identity >= Neighbourhood::kMaxIdentities) return {};
  return Bell(
      reinterpret_cast<std::atomic<std::uint32_t>*>(bells + kLineBytes * static_cast<std::size_t>(identity)));
}

}  // namespace

bool is_unknown_host(std::string_view host) noexcept { return host.starts_with(kUnknownHost); }

void Bell::ring() const noexcept {
  word_->fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(std::uint32_t seen, Duration limit) const noexcept {
  if (limit <= Duration::zero()) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(seconds.count());
  time.tv_nsec = static_cast<long>((limit - seconds).count());
  const TimedWait wait(limit);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word_), FUTEX_WAIT, seen, &time, nullptr, 0);
}

std::string ProcessAddress::encode() const {
  return fmt::format("weft1 {} {} {} {}", host, socket, user, pid);
}

ProcessAddress ProcessAddress::decode(const std::string& text) {
  ProcessAddress a;
  std::istringstream words(text);
  std::string version, rest;
  if (!(words >> version >> a.host >> a.socket >> a.user >> a.pid) || version != "weft1" || words >> rest)
    throw Error(
        ErrorCode::mismatch,
        fmt::format("neighbourhood: \"{}\" is not a process address; expected \"weft1 <host> <socket> <user> "
                    "<process>\", as this version of weft writes it",
                    text));
  return a;
}

namespace {

// Why another process has no memory to share: its limits are not this one's, so the one that was met is named
// without its value.
std::string refusal_text(const Reply& reply) {
  const int error_number = reply.bytes < 4096 ? static_cast<int>(reply.bytes) : 0;
  if (error_number == 0) return {};
  const char* const limit = error_number == EFBIG    ? " (ulimit -f there)"
                            : error_number == EMFILE ? " (ulimit -n there)"
                                                     : "";
  return fmt::format(": {}{}", std::generic_category().message(error_number), limit);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Milliseconds for poll(): rounded up, so that a wait does not spin at its end; a piece of the wait.
int poll_timeout(const Deadline& deadline) {
  const auto piece = std::chrono::ceil<std::chrono::milliseconds>(std::min(deadline.left(), kWaitPiece));
  return static_cast<int>(piece.count());
}

// ---- Regions ----

struct OfferTable;

// A region and what holds it: its mapping, and for the process that offers it the entry in its table; for
// others the Neighbour it came from, so that whoever meets that process again finds this mapping and makes no
// second one.
struct HeldRegion : Region {
  SharedMapping mapping;
  Descriptor memfd;
  int refusal = 0;  // errno, where the system refused a memfd
  std::uint64_t id = 0;
  std::string name;
  std::weak_ptr<OfferTable> offers;
  NeighbourRef from;
  pid_t process = ::getpid();

  explicit HeldRegion(SharedMapping m) : mapping(std::move(m)) {
    data = mapping.data();
    bytes = mapping.bytes();
  }
  HeldRegion(const HeldRegion&) = delete;
  HeldRegion& operator=(const HeldRegion&) = delete;
  ~HeldRegion();
};

// What this process offers, by name. Shared between its threads and the one that serves the socket.
struct OfferTable {
  std::mutex mutex;
  std::condition_variable added;
  std::map<std::string, std::pair<std::uint64_t, std::weak_ptr<HeldRegion>>, std::less<>>
      regions;  // id, region
  std::uint64_t next_id = 1;

  std::shared_ptr<HeldRegion> find(std::string_view name) {
    const auto i = regions.find(name);
    return i == regions.end() ? nullptr : i->second.second.lock();
  }
};

HeldRegion::~HeldRegion() {
  if (process != ::getpid())
    return;  // a forked child: the table is the parent's, its lock may be held for ever
  if (const auto table = offers.lock()) {
    const std::lock_guard lock(table->mutex);
    const auto i = table->regions.find(name);
    if (i != table->regions.end() && i->second.first == id) table->regions.erase(i);
  }
}

// ---- The thread that serves this process's socket ----

class Server {
 public:
  // `bells`: their memfd, or -errno.
  Server(Logger& log, const Arena& arena, const ProcessAddress& self, int bells,
         std::shared_ptr<OfferTable> offers)
      : log_(log),
        arena_(arena),
        user_(self.user),
        bells_(std::max(bells, -1)),
        bells_refusal_(bells < 0 ? -bells : 0),
        offers_(std::move(offers)),
        listener_(listen_abstract(self.socket)),
        stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!stop_) throw_errno("neighbourhood: eventfd", errno);
    connections_.reserve(kNeighbours);
    watched_.reserve(2 + kNeighbours);
    thread_ = start_thread("neighbourhood", [this] { serve(); });
  }

  ~Server() {
    const std::uint64_t one = 1;
    while (::write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {}
    thread_.join();
  }

 private:
  void serve() noexcept {
    ::pthread_setname_np(::pthread_self(), "weft-socket");
    bool listen = true;
    while (true) {
      watched_.clear();
      watched_.push_back({.fd = stop_.get(), .events = POLLIN, .revents = 0});
      watched_.push_back({.fd = listen ? listener_.get() : -1, .events = POLLIN, .revents = 0});
      for (const Descriptor& c : connections_)
        watched_.push_back({.fd = c.get(), .events = POLLIN, .revents = 0});
      const int ready = ::poll(watched_.data(), watched_.size(), listen ? -1 : 50);
      if (watched_[0].revents != 0) break;
      listen = true;
      if (ready <= 0) continue;
      // From the last to the first: what is erased has been looked at.
      for (std::size_t i = connections_.size(); i-- > 0;)
        if (watched_[2 + i].revents != 0 && !answer(connections_[i].get()))
          connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(i));
      if (watched_[1].revents != 0) {
        // Out of memory or descriptors: who knocks waits in the listener's queue until there are some.
        if (!room_for_one()) {
          listen = false;
        } else if (Descriptor c = accept_connection(listener_.get())) {
          if (is_ours(c.get())) connections_.push_back(std::move(c));
        } else {
          listen = errno == EINTR || errno == EAGAIN || errno == ECONNABORTED;
        }
      }
    }
    // A forked child may hold copies: closing alone would not tell the neighbours.
    for (const Descriptor& c : connections_) ::shutdown(c.get(), SHUT_RDWR);
  }

  // In both lists, so that they never need memory anywhere else.
  bool room_for_one() noexcept try {
    const std::size_t wanted = connections_.size() + 1;
    if (wanted > connections_.capacity()) connections_.reserve(2 * wanted);
    if (2 + wanted > watched_.capacity()) watched_.reserve(2 + 2 * wanted);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }

  bool is_ours(int socket) noexcept try {
    const Credentials c = credentials(socket);
    if (c.user == user_) return true;
    log_.write(LogLevel::warning,
               fmt::format("refused process {} of user {}, which asked for memory of this process; "
                           "only user {} may",
                           c.process, c.user, user_));
    const Reply reply{.status = Reply::Status::stranger};
    send_message(socket, &reply, sizeof reply);
    return false;
  } catch (...) {
    return false;
  }

  // Answers one request. False: the connection is at its end.
  bool answer(int socket) noexcept try {
    Request request;
    switch (receive_message(socket, &request, sizeof request)) {
      case Transfer::later: return true;
      case Transfer::closed:
      case Transfer::no_descriptor: return false;
      case Transfer::done: break;
    }
    if (request.magic != Request::kMagic || request.name_bytes > Request::kNameBytes) {
      log_.write(LogLevel::warning, "refused a message on this process's socket that is not weft's");
      return false;
    }
    Reply reply{.status = Reply::Status::absent, .number = request.number};
    int descriptor = -1;
    std::shared_ptr<HeldRegion> region;  // keeps its descriptor open while it is sent
    switch (request.kind) {
      case Request::Kind::bells:
        descriptor = bells_;
        reply.status = descriptor >= 0 ? Reply::Status::ok : Reply::Status::no_memory;
        if (descriptor < 0) reply.bytes = static_cast<std::uint64_t>(bells_refusal_);
        break;
      case Request::Kind::segment:
        if (request.segment >= arena_.segment_count()) break;
        descriptor = arena_.segment_descriptor(request.segment);
        reply.status = Reply::Status::ok;
        reply.bytes = arena_.segment_bytes(request.segment);
        break;
      case Request::Kind::region: {
        const std::lock_guard lock(offers_->mutex);
        region = offers_->find({request.name, request.name_bytes});
        if (!region) break;
        descriptor = region->memfd.get();
        reply.status = descriptor >= 0 ? Reply::Status::ok : Reply::Status::no_memory;
        reply.bytes = descriptor >= 0 ? region->bytes : static_cast<std::uint64_t>(region->refusal);
        reply.id = region->id;
        break;
      }
    }
    // A neighbour has few requests open at a time: a full socket means one that never reads.
    return send_message(socket, &reply, sizeof reply, descriptor) == Transfer::done;
  } catch (...) {
    return false;
  }

  Logger& log_;
  const Arena& arena_;
  const uid_t user_;
  const int bells_, bells_refusal_;
  const std::shared_ptr<OfferTable> offers_;
  Descriptor listener_;
  Descriptor stop_;
  // The thread's. Memory for most jobs is there from the beginning.
  static constexpr std::size_t kNeighbours = 64;
  std::vector<Descriptor> connections_;
  std::vector<pollfd> watched_;
  std::thread thread_;
};

// ---- This process, seen as a neighbour of itself ----

class Self final : public Neighbour {
 public:
  Self(const ProcessAddress& address, Arena& arena, std::byte* bells)
      : address_(address), arena_(arena), bells_(bells) {}
  const ProcessAddress& address() const noexcept override { return address_; }
  bool is_self() const noexcept override { return true; }
  bool alive() const noexcept override { return true; }
  State look() noexcept override { return State::running; }
  std::byte* segment(std::uint32_t index) const noexcept override { return arena_.segment_base(index); }
  bool map_segments(std::uint32_t count, Deadline) noexcept override {
    return count <= arena_.segment_count();
  }
  Bell bell(int identity) const noexcept override { return bell_in(bells_, identity); }

 private:
  const ProcessAddress address_;
  Arena& arena_;
  std::byte* const bells_;
};

// ---- Another process ----

class Remote final : public Neighbour, public std::enable_shared_from_this<Remote> {
 public:
  // Connects and maps the bells; throws as Neighbourhood::meet().
  Remote(Logger& log, const ProcessAddress& address, Deadline deadline) : log_(log), address_(address) {
    connect(deadline);
    const Answer answer = ask({.kind = Request::Kind::bells}, deadline);
    switch (answer.reply.status) {
      case Reply::Status::ok: break;
      case Reply::Status::no_memory:
        throw Error(
            ErrorCode::unsupported,
            fmt::format(
                "neighbourhood: {} has no memory that others can map: its system refuses memfd_create{}",
                who(), refusal_text(answer.reply)));
      case Reply::Status::absent:
      case Reply::Status::stranger: throw other_user();
    }
    bells_ = map(answer, kBellsBytes);
    if (!bells_) throw_errno(fmt::format("neighbourhood: mapping the bells of {}", who()), errno);
  }

  const ProcessAddress& address() const noexcept override { return address_; }
  bool is_self() const noexcept override { return false; }

  // The pidfd becomes readable when the process ends; the socket hangs up when its Context ends, or it turns
  // into another program by exec.
  bool alive() const noexcept override {
    if (dumps_core_.load(std::memory_order_relaxed)) return false;
    std::array<pollfd, 2> ends = {{{.fd = pidfd_.get(), .events = POLLIN, .revents = 0},
                                   {.fd = socket_.get(), .events = 0, .revents = 0}}};
    while (::poll(ends.data(), ends.size(), 0) < 0 && errno == EINTR) {}
    return ends[0].revents == 0 && ends[1].revents == 0;
  }

  State look() noexcept override {
    const ProcessState state = process_state(address_.pid);
    if (!alive()) return State::ended;  // whoever has its number now
    if (state.dumping) dumps_core_.store(true, std::memory_order_relaxed);
    return state.dumping ? State::ended : state.stopped ? State::stopped : State::running;
  }

  std::byte* segment(std::uint32_t index) const noexcept override {
    return index < Arena::kMaxSegments ? bases_[index].load(std::memory_order_acquire) : nullptr;
  }

  bool map_segments(std::uint32_t count, Deadline deadline) noexcept override try {
    if (count > Arena::kMaxSegments) return false;
    bool all = true;
    for (std::uint32_t i = 0; i < count; ++i) all = all && segment(i) != nullptr;
    if (all) return true;
    const Turn turn(*this, deadline);
    all = true;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (segment(i) != nullptr) continue;
      all = !refused_[i] && map_segment(i, deadline) && all;
    }
    return all;
  } catch (...) {  // it died, or did not answer in time
    return false;
  }

  Bell bell(int identity) const noexcept override { return bell_in(bells_.data(), identity); }

  // The region it offers under `name`, or null where it offers none now.
  RegionRef open(const std::string& name, Deadline deadline) {
    Request request{.kind = Request::Kind::region, .name_bytes = static_cast<std::uint32_t>(name.size())};
    std::memcpy(request.name, name.data(), name.size());
    const Turn turn(*this, deadline);
    const Answer answer = exchange(request, deadline);
    switch (answer.reply.status) {
      case Reply::Status::ok: break;
      case Reply::Status::absent: return nullptr;
      case Reply::Status::no_memory:
        throw Error(
            ErrorCode::unsupported,
            fmt::format(
                "neighbourhood: region \"{}\" of {} cannot be mapped: its system refuses memfd_create{}",
                name, who(), refusal_text(answer.reply)));
      case Reply::Status::stranger: throw other_user();
    }
    for (auto i = opened_.begin(); i != opened_.end();)
      i = i->second.expired() ? opened_.erase(i) : std::next(i);
    if (const auto known = opened_.find(answer.reply.id); known != opened_.end())
      if (auto region = known->second.lock()) return region;
    SharedMapping mapping = map(answer, answer.reply.bytes);
    if (!mapping)
      throw_errno(fmt::format("neighbourhood: mapping region \"{}\" of {} ({} bytes)", name, who(),
                              answer.reply.bytes),
                  errno);
    auto region = std::make_shared<HeldRegion>(std::move(mapping));
    region->from = shared_from_this();
    opened_[answer.reply.id] = region;
    return region;
  }

  std::string who() const { return fmt::format("process {}", address_.pid); }

  Error lost(const char* how) const {
    return Error(ErrorCode::peer_lost, fmt::format("neighbourhood: {} {}", who(), how));
  }

 private:
  struct Answer {
    Reply reply;
    Descriptor descriptor;
  };

  // One conversation at a time: whoever holds the turn may use the socket. Bounded, since the one before may
  // be waiting for a stopped process.
  class Turn {
   public:
    Turn(Remote& remote, Deadline deadline) : remote_(remote) {
      const auto start = Clock::now();
      std::unique_lock lock(remote_.turn_mutex_);
      while (remote_.turn_taken_) {
        if (deadline.passed()) throw remote_.no_answer(start);
        const Duration piece = std::min(deadline.left(), kWaitPiece);
        const TimedWait wait(piece);
        remote_.turn_free_.wait_for(lock, piece);
      }
      remote_.turn_taken_ = true;
    }
    ~Turn() {
      const std::lock_guard lock(remote_.turn_mutex_);
      remote_.turn_taken_ = false;
      remote_.turn_free_.notify_one();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Remote& remote_;
  };

  Error no_answer(Clock::time_point start) const {
    return Error(ErrorCode::timeout, fmt::format("neighbourhood: {} did not answer within {:.1f} s", who(),
                                                 seconds_since(start)));
  }

  Error other_user() const {
    return Error(
        ErrorCode::unsupported,
        fmt::format(
            "neighbourhood: {} refused user {}; memory is shared with processes of the same user only", who(),
            ::geteuid()));
  }

  void connect(Deadline deadline) {
    const auto start = Clock::now();
    while (!(socket_ = connect_abstract(address_.socket))) {
      if (errno == ECONNREFUSED) throw lost("has ended: nobody listens on its socket");
      if (errno != EAGAIN && errno != EINTR)
        throw_errno(fmt::format("neighbourhood: connecting to {}", who()), errno);
      if (deadline.passed()) throw no_answer(start);
      sleep_noticing(std::chrono::milliseconds(1));
    }
    const Credentials c = credentials(socket_.get());
    if (c.user != ::geteuid())
      throw Error(
          ErrorCode::unsupported,
          fmt::format(
              "neighbourhood: {} runs as user {}; expected {}, as this process: memory is shared with "
              "processes of the same user only",
              who(), c.user, ::geteuid()));
    if (c.process != address_.pid)
      throw Error(ErrorCode::unsupported,
                  fmt::format("neighbourhood: the socket of {} is held by process {}", who(), c.process));
    // The pid cannot be another process's by now: an answer will come over the connection, after this.
    pidfd_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, c.process, 0)));
    if (!pidfd_ && errno == ESRCH) throw lost("has ended");
    if (!pidfd_ && errno != ENOSYS && errno != EPERM)
      throw_errno(fmt::format("neighbourhood: pidfd of {}", who()), errno);
    // Without pidfds (a kernel before 5.3, a sandbox) the socket alone tells of its end.
  }

  Answer ask(const Request& request, Deadline deadline) {
    const Turn turn(*this, deadline);
    return exchange(request, deadline);
  }

  // Sends and waits for the reply. Replies to requests that were given up earlier are dropped on the way. The
  // caller has the turn.
  Answer exchange(Request request, Deadline deadline) {
    constexpr int kMaxOpen = 8;  // requests without reply: a stopped process does not read
    const auto start = Clock::now();
    request.number = ++last_number_;
    bool sent = false;
    while (true) {
      if (!sent && open_requests_ < kMaxOpen) {
        const Transfer t = send_message(socket_.get(), &request, sizeof request);
        sent = t == Transfer::done;
        if (sent) ++open_requests_;
        // Closed: it may have left a last word (a refusal), which is read below.
      }
      Answer answer;
      switch (receive_message(socket_.get(), &answer.reply, sizeof answer.reply, &answer.descriptor)) {
        case Transfer::done:
          if (answer.reply.status == Reply::Status::stranger) return answer;
          --open_requests_;
          if (answer.reply.number == request.number) return answer;
          continue;
        case Transfer::closed: throw lost("has ended");
        case Transfer::no_descriptor:
          --open_requests_;
          throw_errno(fmt::format("neighbourhood: taking a descriptor from {}", who()), EMFILE);
        case Transfer::later: break;
      }
      if (deadline.passed()) throw no_answer(start);
      const bool may_send = !sent && open_requests_ < kMaxOpen;
      std::array<pollfd, 2> ends = {{{.fd = socket_.get(),
                                      .events = static_cast<short>(POLLIN | (may_send ? POLLOUT : 0)),
                                      .revents = 0},
                                     {.fd = pidfd_.get(), .events = POLLIN, .revents = 0}}};
      const int timeout = poll_timeout(deadline);
      {
        const TimedWait wait{std::chrono::milliseconds(timeout)};
        ::poll(ends.data(), ends.size(), timeout);
      }
      if (ends[1].revents != 0 && ends[0].revents == 0) throw lost("has ended");
    }
  }

  // Maps what came with an answer, where it is as large as promised: beyond its end a mapping is a trap.
  static SharedMapping map(const Answer& answer, std::uint64_t bytes) {
    struct stat file {};
    if (::fstat(answer.descriptor.get(), &file) != 0) return {};
    if (bytes == 0 || static_cast<std::uint64_t>(file.st_size) < bytes) {
      errno = EINVAL;
      return {};
    }
    return SharedMapping::map(answer.descriptor.get(), bytes);
  }

  bool map_segment(std::uint32_t index, Deadline deadline) {
    const Answer answer = exchange({.kind = Request::Kind::segment, .segment = index}, deadline);
    if (answer.reply.status != Reply::Status::ok) return false;
    segments_[index] = map(answer, answer.reply.bytes);
    if (!segments_[index]) {
      refused_[index] = true;
      log_.write_later(  // a group may be held, and the list of all groups
          LogLevel::info,
          fmt::format("segment {} of {} ({} bytes) cannot be mapped ({}); what lies there is copied instead",
                      index, who(), answer.reply.bytes, system_words(errno)));
      return false;
    }
    bases_[index].store(segments_[index].data(), std::memory_order_release);
    return true;
  }

  Logger& log_;
  const ProcessAddress address_;
  Descriptor socket_, pidfd_;
  SharedMapping bells_;
  std::atomic<bool> dumps_core_{false};

  std::mutex turn_mutex_;
  std::condition_variable turn_free_;
  bool turn_taken_ = false;
  // Below: whoever has the turn.
  std::uint64_t last_number_ = 0;
  int open_requests_ = 0;
  std::array<SharedMapping, Arena::kMaxSegments> segments_;
  std::array<bool, Arena::kMaxSegments> refused_{};
  std::map<std::uint64_t, std::weak_ptr<HeldRegion>> opened_;
  // Read by all.
  std::array<std::atomic<std::byte*>, Arena::kMaxSegments> bases_{};
};

}  // namespace

struct Neighbourhood::Impl {
  Impl(Logger& l, Arena& a)
      : log(l),
        arena(a),
        address{.host = this_host(),
                .socket = random_name(),
                .user = static_cast<std::uint32_t>(::geteuid()),
                .pid = static_cast<std::int32_t>(::getpid())},
        bells_memfd(make_bells()),
        bells(SharedMapping::map(bells_memfd.get(), kBellsBytes)) {
    if (!bells)
      throw_errno(fmt::format("neighbourhood: {} bytes for the ranks' bells cannot be had", kBellsBytes),
                  errno);
    self = std::make_shared<Self>(address, arena, bells.data());
    server.emplace(log, arena, address, bells_memfd ? bells_memfd.get() : -refusal, offers);
  }

  Descriptor make_bells() {
    Descriptor fd = make_memfd("weft-bells", kBellsBytes);
    if (!fd) {
      refusal = errno;
      no_shared_memory = fmt::format("memfd_create: {}", system_words(refusal));
    }
    return fd;
  }

  Logger& log;
  Arena& arena;
  const ProcessAddress address;
  int refusal = 0;  // errno, where there is no memfd
  std::string no_shared_memory;
  Descriptor bells_memfd;  // empty where the system has none: then the bells ring within this process only
  SharedMapping bells;
  NeighbourRef self;
  std::shared_ptr<OfferTable> offers = std::make_shared<OfferTable>();

  std::mutex remotes_mutex;
  std::map<std::string, std::weak_ptr<Neighbour>> remotes;  // by socket

  std::optional<Server> server;  // last: its thread uses what is above
};

Neighbourhood::Neighbourhood(Logger& log, Arena& arena) : impl_(std::make_unique<Impl>(log, arena)) {}
Neighbourhood::~Neighbourhood() = default;

const ProcessAddress& Neighbourhood::self() const noexcept { return impl_->address; }
const std::string& Neighbourhood::no_shared_memory() const noexcept { return impl_->no_shared_memory; }

Bell Neighbourhood::own_bell(int identity) noexcept { return bell_in(impl_->bells.data(), identity); }

NeighbourRef Neighbourhood::meet(const ProcessAddress& address, Deadline deadline) {
  const ProcessAddress& self = impl_->address;
  if (address == self) return impl_->self;
  for (const ProcessAddress* a : {&self, &address})
    if (is_unknown_host(a->host))
      throw Error(
          ErrorCode::unsupported,
          fmt::format("neighbourhood: process {} cannot tell its host, where memory could be shared: {}",
                      a->pid, kUnknownHostText));
  if (address.host != self.host)
    throw Error(
        ErrorCode::unsupported,
        fmt::format(
            "neighbourhood: process {} is on another host, or in another pid or network namespace ({}); "
            "expected {}, as this process: memory cannot be shared",
            address.pid, address.host, self.host));
  if (address.user != self.user)
    throw Error(
        ErrorCode::unsupported,
        fmt::format(
            "neighbourhood: process {} runs as user {}; expected {}, as this process: memory is shared "
            "with processes of the same user only",
            address.pid, address.user, self.user));
  const auto known = [&]() -> NeighbourRef {
    const auto i = impl_->remotes.find(address.socket);
    return i == impl_->remotes.end() ? nullptr : i->second.lock();
  };
  {
    const std::lock_guard lock(impl_->remotes_mutex);
    if (NeighbourRef neighbour = known()) return neighbour;
  }
  // Without the lock, since the other process may be slow: two threads may both connect, and the second drops
  // its own.
  auto made = std::make_shared<Remote>(impl_->log, address, deadline);
  const std::lock_guard lock(impl_->remotes_mutex);
  if (NeighbourRef neighbour = known()) return neighbour;
  for (auto i = impl_->remotes.begin(); i != impl_->remotes.end();)
    i = i->second.expired() ? impl_->remotes.erase(i) : std::next(i);
  impl_->remotes[address.socket] = made;
  return made;
}

namespace {

void check_name(const std::string& name) {
  if (name.empty() || name.size() > Request::kNameBytes)
    throw Error(ErrorCode::bad_argument,
                fmt::format("neighbourhood: a region's name has {} bytes; expected 1 to {}", name.size(),
                            Request::kNameBytes));
}

}  // namespace

RegionRef Neighbourhood::offer(const std::string& name, std::size_t bytes) {
  check_name(name);
  if (bytes == 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("neighbourhood: region \"{}\" has 0 bytes; expected at least 1", name));
  Descriptor memfd = make_memfd("weft-region", bytes);
  const int refusal = memfd ? 0 : errno;
  SharedMapping mapping = SharedMapping::map(memfd.get(), bytes);
  if (!mapping)
    throw_errno(fmt::format("neighbourhood: {} bytes for region \"{}\" cannot be had", bytes, name), errno);
  auto region = std::make_shared<HeldRegion>(std::move(mapping));
  region->memfd = std::move(memfd);
  region->refusal = refusal;
  region->name = name;
  OfferTable& offers = *impl_->offers;
  std::shared_ptr<HeldRegion> other;  // outlives the lock, which its destructor would take
  const std::lock_guard lock(offers.mutex);
  other = offers.find(name);
  if (other)
    throw Error(ErrorCode::bad_argument,
                fmt::format("neighbourhood: region \"{}\" is offered already by this process", name));
  region->id = offers.next_id++;
  region->offers = impl_->offers;
  offers.regions[name] = {region->id, region};
  offers.added.notify_all();
  return region;
}

RegionRef Neighbourhood::open(Neighbour& owner, const std::string& name, Deadline deadline) {
  check_name(name);
  const auto start = Clock::now();
  const auto not_offered = [&] {
    return Error(ErrorCode::timeout,
                 fmt::format("neighbourhood: process {} did not offer region \"{}\" within {:.1f} s",
                             owner.address().pid, name, seconds_since(start)));
  };
  if (owner.is_self()) {
    OfferTable& offers = *impl_->offers;
    std::unique_lock lock(offers.mutex);
    while (true) {
      if (RegionRef region = offers.find(name)) return region;
      if (deadline.passed()) throw not_offered();
      const Duration piece = std::min(deadline.left(), kWaitPiece);
      const TimedWait wait(piece);
      offers.added.wait_for(lock, piece);
    }
  }
  auto& remote = static_cast<Remote&>(owner);
  Duration pause = std::chrono::microseconds(100);
  while (true) {
    if (RegionRef region = remote.open(name, deadline)) return region;
    if (!remote.alive()) throw remote.lost("has ended");
    if (deadline.passed()) throw not_offered();
    sleep_noticing(std::min(pause, deadline.left()));
    pause = std::min<Duration>(pause * 2, std::chrono::milliseconds(10));
  }
}

}  // namespace weft
