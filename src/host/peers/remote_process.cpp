#include "host/peers/remote_process.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/shared_words.hpp"
#include "base/waits/suspension.hpp"
#include "host/peers/process_state.hpp"

namespace weft {
namespace {

// Returns the reason why another process has no memory to share. The other process may have other limits than
// this process, so the text names the limit without its value.
std::string refusal_text(const SocketReply& reply) {
  const int error_number = reply.bytes < 4096 ? static_cast<int>(reply.bytes) : 0;
  if (error_number == 0) return {};
  const char* const limit = error_number == EFBIG    ? " (ulimit -f there)"
                            : error_number == EMFILE ? " (ulimit -n there)"
                                                     : "";
  return fmt::format(": {}{}", std::generic_category().message(error_number), limit);
}

// Milliseconds for poll(). It is one piece of the wait, rounded up, so that a wait does not spin at its end.
int poll_timeout(const Deadline& deadline) {
  const auto piece = std::chrono::ceil<std::chrono::milliseconds>(std::min(deadline.left(), wait_piece()));
  return static_cast<int>(piece.count());
}

}  // namespace

RemoteProcess::RemoteProcess(Logger& log, const ProcessAddress& address, Deadline deadline)
    : log_(log), address_(address) {
  // The block, which is opened after this, proves that the pid still belongs to that process. If there is no
  // such process, connecting to its socket fails and reports that.
  static_cast<void>(watch());
  block_ = open_block();
  if (!block_) block_ = ask_for_block(deadline);
  if (has_ended()) throw lost("has ended");
}

// The pidfd becomes readable when the process ends. The block says when its Context ends, or when the process
// becomes another program by exec.
bool RemoteProcess::alive() const noexcept {
  if (has_ended() || dumps_core_.load(std::memory_order_relaxed)) return false;
  if (!pidfd_) return true;
  pollfd end{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  while (::poll(&end, 1, 0) < 0 && errno == EINTR) {}
  return end.revents == 0;
}

PeerProcess::State RemoteProcess::look() noexcept {
  const ProcessState state = process_state(address_.pid);
  if (!alive()) return State::ended;  // the number now belongs to another process
  if (state.dumping) dumps_core_.store(true, std::memory_order_relaxed);
  return state.dumping ? State::ended : state.stopped ? State::stopped : State::running;
}

PeerProcess::MappedSegment RemoteProcess::mapped(std::uint32_t index) const noexcept {
  if (index >= Arena::kMaxSegments) return {};
  const Place& place = places_[index];
  std::byte* const begin = place.begin.load(std::memory_order_acquire);
  return begin == nullptr ? MappedSegment{} : MappedSegment{begin, place.bytes};
}

bool RemoteProcess::map_segments(std::uint32_t count, Deadline deadline) noexcept try {
  if (count > Arena::kMaxSegments) return false;
  bool all = true;
  for (std::uint32_t i = 0; i < count; ++i) all = all && segment(i) != nullptr;
  if (all) return true;
  const Turn turn(*this, deadline);
  all = true;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (segment(i) != nullptr) continue;
    all = !is_refused(i) && map_segment(i, deadline) && all;
  }
  return all;
} catch (...) {  // the process has died, or has not answered in time
  return false;
}

RegionRef RemoteProcess::open(const std::string& name, Deadline deadline) {
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

std::string RemoteProcess::who() const { return fmt::format("process {}", address_.pid); }

Error RemoteProcess::lost(const char* how) const {
  return Error(ErrorCode::peer_lost, fmt::format("host peers: {} {}", who(), how));
}

RemoteProcess::Turn::Turn(RemoteProcess& remote, Deadline deadline) : remote_(remote) {
  const auto start = Clock::now();
  std::unique_lock lock(remote_.turn_mutex_);
  while (remote_.turn_taken_) {
    if (deadline.passed()) throw remote_.no_answer(start);
    const Duration piece = std::min(deadline.left(), wait_piece());
    const TimedWait wait(piece);
    remote_.turn_free_.wait_for(lock, piece);
  }
  remote_.turn_taken_ = true;
}

RemoteProcess::Turn::~Turn() {
  remote_.socket_ = Descriptor();
  const std::lock_guard lock(remote_.turn_mutex_);
  remote_.turn_taken_ = false;
  remote_.turn_free_.notify_one();
}

Error RemoteProcess::no_answer(Clock::time_point start) const {
  return Error(ErrorCode::timeout,
               fmt::format("host peers: {} did not answer within {:.1f} s", who(), seconds_since(start)));
}

Error RemoteProcess::other_user() const {
  return Error(
      ErrorCode::unsupported,
      fmt::format("host peers: {} refused user {}; memory is shared with processes of the same user only",
                  who(), ::geteuid()));
}

bool RemoteProcess::has_ended() const noexcept {
  const std::uint32_t life = block().life.load(std::memory_order_seq_cst);
  return life == ProcessBlock::kEnded || (life & FUTEX_OWNER_DIED) != 0;
}

// Opens the pidfd. Without pidfds (a kernel before 5.3, a sandbox) only the block shows the process's end.
// Returns false if there is no such process.
bool RemoteProcess::watch() {
  pidfd_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, address_.pid, 0)));
  if (!pidfd_ && errno == ESRCH) return false;
  if (!pidfd_ && errno != ENOSYS && errno != EPERM)
    throw_errno(fmt::format("host peers: pidfd of {}", who()), errno);
  return true;
}

// Returns an empty mapping if the system refuses, or if the descriptor is another file.
SharedMapping RemoteProcess::open_block() const {
  const Descriptor file = open_file_of(address_.pid, address_.block, address_.block_inode);
  if (!file) return {};
  SharedMapping mapping = map(file.get(), sizeof(ProcessBlock));
  if (!mapping) return {};
  const char* const name = reinterpret_cast<const ProcessBlock*>(mapping.data())->name;
  return std::string_view(name, ::strnlen(name, kBlockLineBytes)) == address_.socket ? std::move(mapping)
                                                                                     : SharedMapping();
}

SharedMapping RemoteProcess::ask_for_block(Deadline deadline) {
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

void RemoteProcess::connect(Deadline deadline) {
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
  // If an answer arrives over the connection after this, the process is alive and the pid belongs to it.
  // Otherwise the process may have ended while a forked child still holds the connection.
  if (!pidfd_ && !watch()) throw lost("has ended");
}

// Repeats the request as long as too many descriptors of this user are in flight. The caller must have the
// turn.
RemoteProcess::Answer RemoteProcess::exchange(SocketRequest request, Deadline deadline) {
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

// Sends the request and waits for the reply.
RemoteProcess::Answer RemoteProcess::ask(const SocketRequest& request, Deadline deadline,
                                         Clock::time_point start) {
  bool sent = false;
  while (true) {
    // If the connection is closed, a refusal may still wait to be read below.
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

// Maps a file after a check that it is as large as announced, and that its size is fixed. Access beyond its
// end would cause a SIGBUS.
SharedMapping RemoteProcess::map(int fd, std::uint64_t bytes) {
  struct stat file {};
  if (::fstat(fd, &file) != 0) return {};
  if (bytes == 0 || static_cast<std::uint64_t>(file.st_size) < bytes || !keeps_its_size(fd)) {
    errno = EINVAL;
    return {};
  }
  return SharedMapping::map(fd, bytes);
}

bool RemoteProcess::map_segment(std::uint32_t index, Deadline deadline) {
  const ProcessBlock::Segment& shown = block().segments[index];
  std::uint64_t bytes = shown.bytes.load(std::memory_order_acquire);
  Descriptor file;
  if (bytes > 0) file = open_file_of(address_.pid, read_once(shown.descriptor), read_once(shown.inode));
  if (file && !alive()) return false;  // the pid may now belong to another process
  if (!file) {
    Answer answer = exchange({.kind = SocketRequest::Kind::segment, .segment = index}, deadline);
    if (answer.reply.status != SocketReply::Status::ok) return false;
    file = std::move(answer.descriptor);
    bytes = answer.reply.bytes;
  }
  // If the limit leaves no room, the segment is not mapped: its data can be copied instead, and the program
  // needs the addresses.
  const bool room = leaves_addresses(bytes);
  if (!room) errno = ENOMEM;
  SharedMapping mapping = room ? map(file.get(), bytes) : SharedMapping();
  if (!mapping) {
    places_[index].refused.store(true, std::memory_order_release);
    log_.write_later(  // write_later(), because this thread may hold a group, and the list of all groups
        LogLayer::host, LogLevel::info,
        fmt::format("segment {} of {} ({} bytes) cannot be mapped ({}); data there is copied instead", index,
                    who(), bytes, system_words(errno)));
    return false;
  }
  const SharedMapping& kept = segments_[index] = std::move(mapping);
  places_[index].bytes = kept.bytes();
  places_[index].begin.store(kept.data(), std::memory_order_release);
  return true;
}

}  // namespace weft
