#include "host/peers.hpp"

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
#include <bitset>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <latch>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "base/fnv.hpp"
#include "base/memfd.hpp"
#include "base/no_signals.hpp"
#include "base/parse_number.hpp"
#include "base/suspension.hpp"
#include "host/arena.hpp"
#include "host/descriptor_socket.hpp"
#include "host/process_state.hpp"
#include "host/warnings.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"

namespace weft {
namespace {

constexpr std::size_t kLineBytes = 64;

// What a process shows its peer processes, and what they ring. But for the doorbells it writes alone; an
// entry of `segments` once, `bytes` last.
struct ProcessBlock {
  struct Segment {
    std::atomic<std::uint64_t> bytes;  // 0: not there yet
    std::uint64_t inode;
    std::int32_t descriptor;
  };
  struct alignas(kLineBytes) DoorbellLine {
    std::atomic<std::uint32_t> word;
  };
  static constexpr std::uint32_t kEnded = 0, kBegins = 1;

  alignas(kLineBytes) char name[kLineBytes];            // the socket's
  alignas(kLineBytes) std::atomic<std::uint32_t> life;  // see LifeMark
  alignas(kLineBytes) Segment segments[Arena::kMaxSegments];
  DoorbellLine doorbells[HostPeers::kMaxDoorbells];
};

// While it exists, the calling thread's end, however it comes, is told by the word on the block: by the
// kernel (the word is a robust futex) where the process is killed or becomes another program, which a pidfd
// does not tell. Replaces the thread's list of robust mutexes: for a thread that uses none.
class LifeMark {
 public:
  explicit LifeMark(std::atomic<std::uint32_t>& word) noexcept : word_(word) {
    word_.store(static_cast<std::uint32_t>(::syscall(SYS_gettid)), std::memory_order_seq_cst);
    head_.list.next = &node_;
    node_.next = &head_.list;
    head_.futex_offset = reinterpret_cast<char*>(&word_) - reinterpret_cast<char*>(&node_);
    head_.list_op_pending = nullptr;
    ::syscall(SYS_set_robust_list, &head_, sizeof head_);
  }
  ~LifeMark() {
    word_.store(ProcessBlock::kEnded, std::memory_order_seq_cst);
    ::syscall(SYS_set_robust_list, nullptr, sizeof head_);
  }
  LifeMark(const LifeMark&) = delete;
  LifeMark& operator=(const LifeMark&) = delete;

 private:
  std::atomic<std::uint32_t>& word_;
  robust_list_head head_{};
  robust_list node_{};
};

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw_errno("host peers: no random bytes for the socket's name", errno);
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
// not tell, the text is random: then nobody else is a peer_process.
std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string pids = namespace_of("/proc/self/ns/pid"), network = namespace_of("/proc/self/ns/net");
  if (boot.empty() || pids.empty() || network.empty()) return std::string(kUnknownHost) + random_name();
  return fmt::format("{}/{}/{}", boot, pids, network);
}

Doorbell doorbell_on(ProcessBlock* block, int number) {
  if (block == nullptr || number < 0 || number >= HostPeers::kMaxDoorbells) return {};
  return Doorbell(&block->doorbells[number].word);
}

}  // namespace

bool is_unknown_host(std::string_view host) noexcept { return host.starts_with(kUnknownHost); }

std::string ProcessAddress::encode() const {
  return fmt::format("weft1 {} {} {} {} {} {}", host, socket, user, pid, block, block_inode);
}

ProcessAddress ProcessAddress::decode(const std::string& text) {
  std::istringstream words(text);
  std::string version, user, pid, block, inode, rest;
  ProcessAddress a;
  const bool complete =
      static_cast<bool>(words >> version >> a.host >> a.socket >> user >> pid >> block >> inode);
  const auto read = [](auto& number, const std::string& word) {
    const auto is = parse_integer<std::remove_reference_t<decltype(number)>>(word);
    number = is.value_or(0);
    return is.has_value();
  };
  if (!complete || version != "weft1" || words >> rest || !read(a.user, user) || !read(a.pid, pid) ||
      a.pid < 1 || !read(a.block, block) || a.block < -1 || !read(a.block_inode, inode))
    throw Error(
        ErrorCode::mismatch,
        fmt::format("host peers: \"{}\" is not a process address; expected \"weft1 <host> <socket> <user> "
                    "<process> <block> <inode>\", as this version of weft writes it",
                    text));
  return a;
}

namespace {

// Why another process has no memory to share: its limits are not this one's, so the one that was met is named
// without its value.
std::string refusal_text(const SocketReply& reply) {
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
// others the PeerProcess it came from, so that whoever meets that process again finds this mapping and makes
// no second one.
struct HeldRegion : Region {
  SharedMapping mapping;
  Descriptor memfd;
  int refusal = 0;  // errno, where the system refused a memfd
  std::uint64_t id = 0;
  std::string name;
  std::weak_ptr<OfferTable> offers;
  PeerProcessRef from;
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

constexpr std::chrono::milliseconds kLookAgain{50};  // for descriptors, where there were none
constexpr int kRefusedLooks = 10;                    // half a second: they do not come back by themselves

class Server {
 public:
  // `refusal`: why there is no memfd of the block (errno), or 0.
  Server(Logger& log, const Arena& arena, const ProcessAddress& self, ProcessBlock& block, int refusal,
         std::shared_ptr<OfferTable> offers)
      : warnings_(log, "host_peers"),
        arena_(arena),
        user_(self.user),
        block_(block),
        block_descriptor_(self.block),
        block_refusal_(refusal),
        offers_(std::move(offers)),
        listener_(listen_abstract(self.socket)),
        stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!stop_) throw_errno("host peers: eventfd", errno);
    connections_.reserve(kPeers);
    watched_.reserve(2 + kPeers);
    thread_ = start_thread("host_peers", [this] { serve(); });
    marked_
        .wait();  // a process that becomes another program right now has ended for those who know its address
  }

  // errno, where at least so many looks in a row, kLookAgain apart, found somebody who could not be let in;
  // else 0.
  int refuses(int looks) const noexcept {
    return refused_looks_.load(std::memory_order_acquire) < looks ? 0
                                                                  : refusal_.load(std::memory_order_relaxed);
  }

  ~Server() {
    const std::uint64_t one = 1;
    while (::write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {}
    thread_.join();
  }

 private:
  void serve() noexcept {
    ::pthread_setname_np(::pthread_self(), "weft-socket");
    const LifeMark mark(block_.life);
    marked_.count_down();
    bool listen = true;
    while (true) {
      watched_.clear();
      watched_.push_back({.fd = stop_.get(), .events = POLLIN, .revents = 0});
      watched_.push_back({.fd = listen ? listener_.get() : -1, .events = POLLIN, .revents = 0});
      for (const Descriptor& c : connections_)
        watched_.push_back({.fd = c.get(), .events = POLLIN, .revents = 0});
      const int ready = ::poll(watched_.data(), watched_.size(), timeout(listen));
      if (watched_[0].revents != 0) break;
      warnings_.look(Clock::now());
      listen = true;
      if (ready <= 0) continue;
      // From the last to the first: what is erased has been looked at.
      for (std::size_t i = connections_.size(); i-- > 0;)
        if (watched_[2 + i].revents != 0 && !answer(connections_[i].get()))
          connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(i));
      if (watched_[1].revents != 0) {
        // Out of memory or descriptors: who knocks waits in the listener's queue until there are some.
        int refusal = 0;
        if (!room_for_one()) {
          refusal = ENOMEM;
        } else if (Descriptor c = accept_connection(listener_.get())) {
          if (is_ours(c.get())) connections_.push_back(std::move(c));
        } else if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) {
          refusal = errno;
        }
        listen = refusal == 0;
        refusal_.store(refusal, std::memory_order_relaxed);
        refused_looks_.store(listen ? 0 : refused_looks_.load(std::memory_order_relaxed) + 1,
                             std::memory_order_release);
      }
    }
    // A forked child may hold copies: closing alone would not tell the peer_processes.
    ::shutdown(listener_.get(), SHUT_RDWR);
    for (const Descriptor& c : connections_) ::shutdown(c.get(), SHUT_RDWR);
  }

  // Until there may be descriptors again, or warnings that were left out are to be told of.
  int timeout(bool listen) const noexcept {
    const int soon = listen ? -1 : static_cast<int>(kLookAgain.count());
    if (warnings_.next() == Clock::time_point::max()) return soon;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(warnings_.next() - Clock::now()).count();
    const int then = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
    return listen ? then : std::min(soon, then);
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
    warnings_.write(
        fmt::format("refused process {} of user {}, which asked for memory of this process; "
                    "only user {} may",
                    c.process, c.user, user_));
    const SocketReply reply{.status = SocketReply::Status::other_user};
    send_message(socket, &reply, sizeof reply);
    return false;
  } catch (...) {
    return false;
  }

  // Answers one request. False: the connection is at its end.
  bool answer(int socket) noexcept try {
    SocketRequest request;
    switch (receive_message(socket, &request, sizeof request)) {
      case Transfer::later: return true;
      case Transfer::closed:
      case Transfer::too_many_in_flight:
      case Transfer::no_descriptor: return false;
      case Transfer::done: break;
    }
    if (request.magic != SocketRequest::kMagic || request.name_bytes > SocketRequest::kNameBytes) {
      warnings_.write("refused a message on this process's socket that is not weft's");
      return false;
    }
    SocketReply reply{.status = SocketReply::Status::absent, .number = request.number};
    int descriptor = -1;
    std::shared_ptr<HeldRegion> region;  // keeps its descriptor open while it is sent
    switch (request.kind) {
      case SocketRequest::Kind::block:
        descriptor = block_descriptor_;
        reply.status = descriptor >= 0 ? SocketReply::Status::ok : SocketReply::Status::no_memory;
        if (descriptor < 0) reply.bytes = static_cast<std::uint64_t>(block_refusal_);
        break;
      case SocketRequest::Kind::segment:
        if (request.segment >= arena_.segment_count()) break;
        descriptor = arena_.segment_descriptor(request.segment);
        reply.status = SocketReply::Status::ok;
        reply.bytes = arena_.segment_bytes(request.segment);
        break;
      case SocketRequest::Kind::region: {
        const std::lock_guard lock(offers_->mutex);
        region = offers_->find({request.name, request.name_bytes});
        if (!region) break;
        descriptor = region->memfd.get();
        reply.status = descriptor >= 0 ? SocketReply::Status::ok : SocketReply::Status::no_memory;
        reply.bytes = descriptor >= 0 ? region->bytes : static_cast<std::uint64_t>(region->refusal);
        reply.id = region->id;
        break;
      }
    }
    const Transfer sent = send_message(socket, &reply, sizeof reply, descriptor);
    if (sent == Transfer::too_many_in_flight) {
      reply.status = SocketReply::Status::busy;
      return send_message(socket, &reply, sizeof reply) == Transfer::done;
    }
    // A peer process has one request open at a time: a full socket means one that never reads.
    return sent == Transfer::done;
  } catch (...) {
    return false;
  }

  Warnings warnings_;  // the thread's
  const Arena& arena_;
  const uid_t user_;
  ProcessBlock& block_;
  const int block_descriptor_, block_refusal_;
  const std::shared_ptr<OfferTable> offers_;
  Descriptor listener_;
  Descriptor stop_;
  std::atomic<int> refusal_{0}, refused_looks_{0};
  // The thread's. Memory for most jobs is there from the beginning.
  static constexpr std::size_t kPeers = 64;
  std::vector<Descriptor> connections_;
  std::vector<pollfd> watched_;
  std::latch marked_{1};  // its life is on the block
  std::thread thread_;
};

// ---- This process, seen as a peer process of itself ----

class Self final : public PeerProcess {
 public:
  Self(const ProcessAddress& address, Arena& arena, ProcessBlock* block)
      : address_(address), arena_(arena), block_(block) {}
  const ProcessAddress& address() const noexcept override { return address_; }
  bool is_self() const noexcept override { return true; }
  bool alive() const noexcept override { return true; }
  State look() noexcept override { return State::running; }
  std::byte* segment(std::uint32_t index) const noexcept override { return arena_.segment_base(index); }
  bool map_segments(std::uint32_t count, Deadline) noexcept override {
    return count <= arena_.segment_count();
  }
  Doorbell doorbell(int number) const noexcept override { return doorbell_on(block_, number); }

 private:
  const ProcessAddress address_;
  Arena& arena_;
  ProcessBlock* const block_;
};

// ---- Another process ----

class Remote final : public PeerProcess, public std::enable_shared_from_this<Remote> {
 public:
  // Maps the block; throws as HostPeers::meet().
  Remote(Logger& log, const ProcessAddress& address, Deadline deadline) : log_(log), address_(address) {
    // The pid cannot be another process's: the block, which is opened after this, is the one we mean. Where
    // there is no such process, its socket is asked in vain, and that is told.
    static_cast<void>(watch());
    block_ = open_block();
    if (!block_) block_ = ask_for_board(deadline);
    if (has_ended()) throw lost("has ended");
  }

  const ProcessAddress& address() const noexcept override { return address_; }
  bool is_self() const noexcept override { return false; }

  // The pidfd becomes readable when the process ends; the block tells where its Context ends, or it turns
  // into another program by exec.
  bool alive() const noexcept override {
    if (has_ended() || dumps_core_.load(std::memory_order_relaxed)) return false;
    if (!pidfd_) return true;
    pollfd end{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    while (::poll(&end, 1, 0) < 0 && errno == EINTR) {}
    return end.revents == 0;
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

  Doorbell doorbell(int number) const noexcept override { return doorbell_on(&block(), number); }

  // The region it offers under `name`, or null where it offers none now.
  RegionRef open(const std::string& name, Deadline deadline) {
    SocketRequest request{.kind = SocketRequest::Kind::region,
                          .name_bytes = static_cast<std::uint32_t>(name.size())};
    std::memcpy(request.name, name.data(), name.size());
    const Turn turn(*this, deadline);
    const Answer answer = exchange(request, deadline);
    switch (answer.reply.status) {
      case SocketReply::Status::ok: break;
      case SocketReply::Status::busy:
      case SocketReply::Status::absent: return nullptr;
      case SocketReply::Status::no_memory:
        throw Error(
            ErrorCode::unsupported,
            fmt::format("host peers: region \"{}\" of {} cannot be mapped: its system refuses memfd_create{}",
                        name, who(), refusal_text(answer.reply)));
      case SocketReply::Status::other_user: throw other_user();
    }
    for (auto i = opened_.begin(); i != opened_.end();)
      i = i->second.expired() ? opened_.erase(i) : std::next(i);
    if (const auto known = opened_.find(answer.reply.id); known != opened_.end())
      if (auto region = known->second.lock()) return region;
    SharedMapping mapping = map(answer.descriptor.get(), answer.reply.bytes);
    if (!mapping)
      throw_errno(
          fmt::format("host peers: mapping region \"{}\" of {} ({} bytes)", name, who(), answer.reply.bytes),
          errno);
    auto region = std::make_shared<HeldRegion>(std::move(mapping));
    region->from = shared_from_this();
    opened_[answer.reply.id] = region;
    return region;
  }

  std::string who() const { return fmt::format("process {}", address_.pid); }

  Error lost(const char* how) const {
    return Error(ErrorCode::peer_lost, fmt::format("host peers: {} {}", who(), how));
  }

 private:
  struct Answer {
    SocketReply reply;
    Descriptor descriptor;
  };

  // One conversation at a time, over a connection of its own: whoever holds the turn may use the socket.
  // Bounded, since the one before may be waiting for a stopped process.
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
      remote_.socket_ = Descriptor();
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
    return Error(ErrorCode::timeout,
                 fmt::format("host peers: {} did not answer within {:.1f} s", who(), seconds_since(start)));
  }

  Error other_user() const {
    return Error(
        ErrorCode::unsupported,
        fmt::format("host peers: {} refused user {}; memory is shared with processes of the same user only",
                    who(), ::geteuid()));
  }

  ProcessBlock& block() const noexcept { return *reinterpret_cast<ProcessBlock*>(block_.data()); }

  bool has_ended() const noexcept {
    const std::uint32_t life = block().life.load(std::memory_order_seq_cst);
    return life == ProcessBlock::kEnded || (life & FUTEX_OWNER_DIED) != 0;
  }

  // Without pidfds (a kernel before 5.3, a sandbox) the block alone tells of its end. False: there is no such
  // process.
  bool watch() {
    pidfd_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, address_.pid, 0)));
    if (!pidfd_ && errno == ESRCH) return false;
    if (!pidfd_ && errno != ENOSYS && errno != EPERM)
      throw_errno(fmt::format("host peers: pidfd of {}", who()), errno);
    return true;
  }

  // Empty where the system does not let us, and where another file has that place.
  SharedMapping open_block() const {
    const Descriptor file = open_file_of(address_.pid, address_.block, address_.block_inode);
    if (!file) return {};
    SharedMapping mapping = map(file.get(), sizeof(ProcessBlock));
    if (!mapping) return {};
    const char* const name = reinterpret_cast<const ProcessBlock*>(mapping.data())->name;
    return std::string_view(name, ::strnlen(name, kLineBytes)) == address_.socket ? std::move(mapping)
                                                                                  : SharedMapping();
  }

  SharedMapping ask_for_board(Deadline deadline) {
    const Turn turn(*this, deadline);
    const Answer answer = exchange({.kind = SocketRequest::Kind::block}, deadline);
    switch (answer.reply.status) {
      case SocketReply::Status::ok: break;
      case SocketReply::Status::no_memory:
        throw Error(
            ErrorCode::unsupported,
            fmt::format("host peers: {} has no memory that others can map: its system refuses memfd_create{}",
                        who(), refusal_text(answer.reply)));
      case SocketReply::Status::busy:
      case SocketReply::Status::absent:
      case SocketReply::Status::other_user: throw other_user();
    }
    SharedMapping mapping = map(answer.descriptor.get(), sizeof(ProcessBlock));
    if (!mapping) throw_errno(fmt::format("host peers: mapping the block of {}", who()), errno);
    return mapping;
  }

  void connect(Deadline deadline) {
    const auto start = Clock::now();
    while (!(socket_ = connect_abstract(address_.socket))) {
      if (errno == ECONNREFUSED) throw lost(block_ ? "has ended" : "has ended: nobody listens on its socket");
      if (errno != EAGAIN && errno != EINTR)
        throw_errno(fmt::format("host peers: connecting to {}", who()), errno);
      if (deadline.passed()) throw no_answer(start);
      sleep_noticing(std::chrono::milliseconds(1));
    }
    const Credentials c = credentials(socket_.get());
    if (c.user != ::geteuid())
      throw Error(
          ErrorCode::unsupported,
          fmt::format("host peers: {} runs as user {}; expected {}, as this process: memory is shared with "
                      "processes of the same user only",
                      who(), c.user, ::geteuid()));
    if (c.process != address_.pid)
      throw Error(ErrorCode::unsupported,
                  fmt::format("host peers: the socket of {} is held by process {}", who(), c.process));
    // The pid cannot be another process's by now: an answer will come over the connection, after this.
    // A forked child may hold a copy of the socket of a process that has ended.
    if (!pidfd_ && !watch()) throw lost("has ended");
  }

  // Asks until there is an answer, where descriptors of this user crowd the system. The caller has the turn.
  Answer exchange(SocketRequest request, Deadline deadline) {
    const auto start = Clock::now();
    if (!socket_) connect(deadline);
    while (true) {
      request.number = ++last_number_;
      Answer answer = ask(request, deadline, start);
      if (answer.reply.status != SocketReply::Status::busy) return answer;
      if (deadline.passed()) throw no_answer(start);
      sleep_noticing(std::chrono::milliseconds(1));
    }
  }

  // Sends and waits for the reply.
  Answer ask(const SocketRequest& request, Deadline deadline, Clock::time_point start) {
    bool sent = false;
    while (true) {
      // Closed: it may have left a last word (a refusal), which is read below.
      if (!sent) sent = send_message(socket_.get(), &request, sizeof request) == Transfer::done;
      Answer answer;
      switch (receive_message(socket_.get(), &answer.reply, sizeof answer.reply, &answer.descriptor)) {
        case Transfer::done:
          if (answer.reply.status == SocketReply::Status::other_user || answer.reply.number == request.number)
            return answer;
          continue;
        case Transfer::closed: throw lost("has ended");
        case Transfer::no_descriptor:
          throw_errno(fmt::format("host peers: taking a descriptor from {}", who()), EMFILE);
        case Transfer::too_many_in_flight:
        case Transfer::later: break;
      }
      if (deadline.passed()) throw no_answer(start);
      std::array<pollfd, 2> ends = {
          {{.fd = socket_.get(), .events = static_cast<short>(POLLIN | (sent ? 0 : POLLOUT)), .revents = 0},
           {.fd = pidfd_.get(), .events = POLLIN, .revents = 0}}};
      const int timeout = poll_timeout(deadline);
      {
        const TimedWait wait{std::chrono::milliseconds(timeout)};
        ::poll(ends.data(), ends.size(), timeout);
      }
      if (ends[0].revents == 0 && (ends[1].revents != 0 || (block_ && has_ended()))) throw lost("has ended");
    }
  }

  // Maps a file that is as large as promised: beyond its end a mapping is a trap.
  static SharedMapping map(int fd, std::uint64_t bytes) {
    struct stat file {};
    if (::fstat(fd, &file) != 0) return {};
    if (bytes == 0 || static_cast<std::uint64_t>(file.st_size) < bytes) {
      errno = EINVAL;
      return {};
    }
    return SharedMapping::map(fd, bytes);
  }

  bool map_segment(std::uint32_t index, Deadline deadline) {
    const ProcessBlock::Segment& shown = block().segments[index];
    std::uint64_t bytes = shown.bytes.load(std::memory_order_acquire);
    Descriptor file;
    if (bytes > 0) file = open_file_of(address_.pid, shown.descriptor, shown.inode);
    if (file && !alive()) return false;  // another process may have had its number by then
    if (!file) {
      Answer answer = exchange({.kind = SocketRequest::Kind::segment, .segment = index}, deadline);
      if (answer.reply.status != SocketReply::Status::ok) return false;
      file = std::move(answer.descriptor);
      bytes = answer.reply.bytes;
    }
    SharedMapping mapping = map(file.get(), bytes);
    if (!mapping) {
      refused_[index] = true;
      log_.write_later(  // a group may be held, and the list of all groups
          LogLevel::info,
          fmt::format("segment {} of {} ({} bytes) cannot be mapped ({}); what lies there is copied instead",
                      index, who(), bytes, system_words(errno)));
      return false;
    }
    const SharedMapping& kept = segments_[index] = std::move(mapping);
    bases_[index].store(kept.data(), std::memory_order_release);
    return true;
  }

  Logger& log_;
  const ProcessAddress address_;
  Descriptor pidfd_;
  SharedMapping block_;
  std::atomic<bool> dumps_core_{false};

  std::mutex turn_mutex_;
  std::condition_variable turn_free_;
  bool turn_taken_ = false;
  // Below: whoever has the turn.
  Descriptor socket_;
  std::uint64_t last_number_ = 0;
  std::map<std::uint32_t, SharedMapping> segments_;
  std::bitset<Arena::kMaxSegments> refused_;
  std::map<std::uint64_t, std::weak_ptr<HeldRegion>> opened_;
  // Read by all.
  std::array<std::atomic<std::byte*>, Arena::kMaxSegments> bases_{};
};

}  // namespace

struct HostPeers::Impl {
  Impl(Logger& l, Arena& a)
      : log(l),
        arena(a),
        block_memfd(make_block()),
        block_mapping(SharedMapping::map(block_memfd.get(), sizeof(ProcessBlock))),
        address{.host = this_host(),
                .socket = random_name(),
                .user = static_cast<std::uint32_t>(::geteuid()),
                .pid = static_cast<std::int32_t>(::getpid()),
                .block = block_memfd.get(),
                .block_inode = inode_of(block_memfd.get())} {
    if (!block_mapping)
      throw_errno(
          fmt::format("host peers: {} bytes for the ranks' doorbells cannot be had", sizeof(ProcessBlock)),
          errno);
    address.socket.copy(block().name, kLineBytes - 1);
    block().life.store(ProcessBlock::kBegins, std::memory_order_seq_cst);
    self = std::make_shared<Self>(address, arena, &block());
    server.emplace(log, arena, address, block(), refusal, offers);
  }

  Descriptor make_block() {
    Descriptor fd = make_memfd("weft-process", sizeof(ProcessBlock));
    if (!fd) {
      refusal = errno;
      no_shared_memory = fmt::format("memfd_create: {}", system_words(refusal));
    }
    return fd;
  }
  ProcessBlock& block() noexcept { return *reinterpret_cast<ProcessBlock*>(block_mapping.data()); }

  Logger& log;
  Arena& arena;
  int refusal = 0;  // errno, where there is no memfd
  std::string no_shared_memory;
  Descriptor
      block_memfd;  // empty where the system has none: then the doorbells ring within this process only
  SharedMapping block_mapping;
  const ProcessAddress address;
  PeerProcessRef self;
  std::shared_ptr<OfferTable> offers = std::make_shared<OfferTable>();

  std::mutex remotes_mutex;
  std::map<std::string, std::weak_ptr<PeerProcess>> remotes;  // by socket
  std::size_t sweep_at = 64;                                  // remotes, when those that are gone are dropped

  std::mutex doorbells_mutex;
  std::map<int, int> doorbell_numbers;  // by process_rank
  std::mutex shown_mutex;
  std::atomic<std::uint32_t> shown{0};  // segments on the block

  std::optional<Server> server;  // last: its thread uses what is above
};

HostPeers::HostPeers(Logger& log, Arena& arena) : impl_(std::make_unique<Impl>(log, arena)) {}
HostPeers::~HostPeers() = default;

const ProcessAddress& HostPeers::self() const noexcept { return impl_->address; }
const std::string& HostPeers::no_shared_memory() const noexcept { return impl_->no_shared_memory; }

int HostPeers::doorbell_number(int process_rank) {
  const std::lock_guard lock(impl_->doorbells_mutex);
  auto& numbers = impl_->doorbell_numbers;
  if (const auto known = numbers.find(process_rank); known != numbers.end()) return known->second;
  if (numbers.size() == kMaxDoorbells)
    throw Error(
        ErrorCode::unsupported,
        fmt::format("host peers: no doorbell for process_rank {}: {} ranks are threads of this process; "
                    "expected at most that many",
                    process_rank, kMaxDoorbells));
  const int number = static_cast<int>(numbers.size());
  numbers.emplace(process_rank, number);
  return number;
}

Doorbell HostPeers::own_doorbell(int process_rank) {
  return process_rank < 0 ? Doorbell() : doorbell_on(&impl_->block(), doorbell_number(process_rank));
}

std::uint64_t HostPeers::process_block_layout() noexcept {
  return digest_of(sizeof(ProcessBlock), offsetof(ProcessBlock, name), offsetof(ProcessBlock, life),
                   offsetof(ProcessBlock, segments), offsetof(ProcessBlock, doorbells),
                   sizeof(ProcessBlock::Segment), offsetof(ProcessBlock::Segment, bytes),
                   offsetof(ProcessBlock::Segment, inode), offsetof(ProcessBlock::Segment, descriptor),
                   sizeof(ProcessBlock::DoorbellLine));
}

void HostPeers::show_segments() noexcept {
  const std::uint32_t made = impl_->arena.segment_count();
  if (impl_->shown.load(std::memory_order_acquire) >= made) return;
  const std::lock_guard lock(impl_->shown_mutex);
  for (std::uint32_t i = impl_->shown.load(std::memory_order_relaxed); i < made; ++i) {
    ProcessBlock::Segment& segment = impl_->block().segments[i];
    segment.descriptor = impl_->arena.segment_descriptor(i);
    segment.inode = inode_of(segment.descriptor);
    segment.bytes.store(impl_->arena.segment_bytes(i), std::memory_order_release);
    impl_->shown.store(i + 1, std::memory_order_release);
  }
}

PeerProcessRef HostPeers::meet(const ProcessAddress& address, Deadline deadline) {
  const ProcessAddress& self = impl_->address;
  if (address == self) return impl_->self;
  for (const ProcessAddress* a : {&self, &address})
    if (is_unknown_host(a->host))
      throw Error(ErrorCode::unsupported,
                  fmt::format("host peers: process {} cannot tell its host, where memory could be shared: {}",
                              a->pid, kUnknownHostText));
  if (address.host != self.host)
    throw Error(
        ErrorCode::unsupported,
        fmt::format("host peers: process {} is on another host, or in another pid or network namespace ({}); "
                    "expected {}, as this process: memory cannot be shared",
                    address.pid, address.host, self.host));
  if (address.user != self.user)
    throw Error(
        ErrorCode::unsupported,
        fmt::format("host peers: process {} runs as user {}; expected {}, as this process: memory is shared "
                    "with processes of the same user only",
                    address.pid, address.user, self.user));
  const auto known = [&]() -> PeerProcessRef {
    const auto i = impl_->remotes.find(address.socket);
    return i == impl_->remotes.end() ? nullptr : i->second.lock();
  };
  {
    const std::lock_guard lock(impl_->remotes_mutex);
    if (PeerProcessRef peer_process = known()) return peer_process;
  }
  // Without the lock, since the other process may be slow: two threads may both connect, and the second drops
  // its own.
  auto made = std::make_shared<Remote>(impl_->log, address, deadline);
  const std::lock_guard lock(impl_->remotes_mutex);
  if (PeerProcessRef peer_process = known()) return peer_process;
  impl_->remotes[address.socket] = made;
  if (impl_->remotes.size() >= impl_->sweep_at) {  // now and then, so that many are met in little time
    for (auto i = impl_->remotes.begin(); i != impl_->remotes.end();)
      i = i->second.expired() ? impl_->remotes.erase(i) : std::next(i);
    impl_->sweep_at = 64 + 2 * impl_->remotes.size();
  }
  return made;
}

namespace {

void check_name(const std::string& name) {
  if (name.empty() || name.size() > SocketRequest::kNameBytes)
    throw Error(ErrorCode::bad_argument,
                fmt::format("host peers: a region's name has {} bytes; expected 1 to {}", name.size(),
                            SocketRequest::kNameBytes));
}

}  // namespace

RegionRef HostPeers::offer(const std::string& name, std::size_t bytes) {
  check_name(name);
  if (bytes == 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("host peers: region \"{}\" has 0 bytes; expected at least 1", name));
  Descriptor memfd = make_memfd("weft-region", bytes);
  const int refusal = memfd ? 0 : errno;
  SharedMapping mapping = SharedMapping::map(memfd.get(), bytes);
  if (!mapping)
    throw_errno(fmt::format("host peers: {} bytes for region \"{}\" cannot be had", bytes, name), errno);
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
                fmt::format("host peers: region \"{}\" is offered already by this process", name));
  region->id = offers.next_id++;
  region->offers = impl_->offers;
  offers.regions[name] = {region->id, region};
  offers.added.notify_all();
  return region;
}

void HostPeers::check_admits(bool last) const {
  if (const int refusal = impl_->server ? impl_->server->refuses(last ? 1 : kRefusedLooks) : 0; refusal != 0)
    throw_errno("host peers: this process cannot take the connection of another one", refusal);
}

RegionRef HostPeers::open(PeerProcess& owner, const std::string& name, Deadline deadline) {
  check_name(name);
  const auto start = Clock::now();
  const auto not_offered = [&] {
    return Error(ErrorCode::timeout,
                 fmt::format("host peers: process {} did not offer region \"{}\" within {:.1f} s",
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
