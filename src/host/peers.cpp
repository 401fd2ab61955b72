#include "host/peers.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/hash.hpp"
#include "base/memfd.hpp"
#include "base/waits/suspension.hpp"
#include "host/arena.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "host/peers/remote_process.hpp"
#include "host/peers/socket_server.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"

namespace weft {
namespace {

// This process, as a peer process of itself.
class ThisProcess final : public PeerProcess {
 public:
  ThisProcess(const ProcessAddress& address, Arena& arena, ProcessBlock* block)
      : address_(address), arena_(arena), block_(block) {}
  const ProcessAddress& address() const noexcept override { return address_; }
  bool is_self() const noexcept override { return true; }
  bool alive() const noexcept override { return true; }
  State look() noexcept override { return State::running; }
  MappedSegment mapped(std::uint32_t index) const noexcept override {
    return {arena_.segment_base(index), arena_.segment_bytes(index)};
  }
  bool map_segments(std::uint32_t count, Deadline) noexcept override {
    return count <= arena_.segment_count();
  }
  bool is_refused(std::uint64_t) const noexcept override { return false; }
  Doorbell doorbell(int number) const noexcept override { return doorbell_on(block_, number); }

 private:
  const ProcessAddress address_;
  Arena& arena_;
  ProcessBlock* const block_;
};

constexpr int kRefusedLooks = 10;  // half a second: by then, descriptors have not become free by themselves

}  // namespace

struct HostPeers::Impl {
  Impl(Logger& l, Arena& a)
      : log(l),
        arena(a),
        block_memfd(make_block()),
        block_mapping(SharedMapping::map(block_memfd.get(), sizeof(ProcessBlock))),
        address{.host = this_host(),
                .socket = random_socket_name(),
                .user = static_cast<std::uint32_t>(::geteuid()),
                .pid = static_cast<std::int32_t>(::getpid()),
                .block = block_memfd.get(),
                .block_inode = inode_of(block_memfd.get())} {
    if (!block_mapping)
      throw_errno(fmt::format("host peers: {} bytes for the ranks' doorbells cannot be allocated",
                              sizeof(ProcessBlock)),
                  errno);
    address.socket.copy(block().name, kBlockLineBytes - 1);
    block().life.store(ProcessBlock::kBegins, std::memory_order_seq_cst);
    self = std::make_shared<ThisProcess>(address, arena, &block());
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
  int refusal = 0;  // the errno, if the system refused the memfd
  std::string no_shared_memory;
  Descriptor block_memfd;  // empty if the system refused it; then the doorbells work only within this process
  SharedMapping block_mapping;
  const ProcessAddress address;
  PeerProcessRef self;
  std::shared_ptr<OfferTable> offers = std::make_shared<OfferTable>();

  std::mutex remotes_mutex;
  std::map<std::string, std::weak_ptr<PeerProcess>> remotes;  // by socket
  std::size_t sweep_at = 64;  // number of remotes at which expired entries are removed

  std::mutex doorbells_mutex;
  std::map<int, int> doorbell_numbers;  // by process_rank
  std::mutex shown_mutex;
  std::atomic<std::uint32_t> shown{0};  // the number of segments that the block lists

  std::optional<SocketServer> server;  // the last member, because its thread uses the members above
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
      throw Error(
          ErrorCode::unsupported,
          fmt::format("host peers: process {} cannot determine its host, where memory could be shared: {}",
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
  // This runs without the lock, since the other process may be slow. If two threads connect at once, the
  // second thread's connection is dropped.
  auto made = std::make_shared<RemoteProcess>(impl_->log, address, deadline);
  const std::lock_guard lock(impl_->remotes_mutex);
  if (PeerProcessRef peer_process = known()) return peer_process;
  impl_->remotes[address.socket] = made;
  // only from time to time, so that meeting many processes does not take long
  if (impl_->remotes.size() >= impl_->sweep_at) {
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
    throw_errno(fmt::format("host peers: {} bytes for region \"{}\" cannot be allocated", bytes, name),
                errno);
  auto region = std::make_shared<HeldRegion>(std::move(mapping));
  region->memfd = std::move(memfd);
  region->refusal = refusal;
  region->name = name;
  OfferTable& offers = *impl_->offers;
  std::shared_ptr<HeldRegion> other;  // declared before the lock, because its destructor would take the lock
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

int HostPeers::next_region_number() noexcept {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 30;
  const std::lock_guard lock(impl_->offers->mutex);
  return static_cast<int>(1 + impl_->offers->numbers_given++ % kMost);
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
      const Duration piece = std::min(deadline.left(), wait_piece());
      const TimedWait wait(piece);
      offers.added.wait_for(lock, piece);
    }
  }
  auto& remote = static_cast<RemoteProcess&>(owner);
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
