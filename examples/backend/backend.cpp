// The smallest useful transport: a message is a file in a folder. It can send and receive; weft composes
// every collective of that. What weft's own transports are built from does the rest: the ranks meet by
// join(), the first failure of all ranks is kept by FirstCause, messages find their receives by
// MessageMatcher, HostRanks wakes ranks that sleep and notices those that die, and RollCallMessages tells which
// rank holds the others up at a deadline. Read docs/backends.md beside it.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "weft/backends/first_cause.hpp"
#include "weft/backends/host_ranks.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/matching.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/backends/roll_call_messages.hpp"

namespace {

namespace fs = std::filesystem;
using namespace weft;

Traits example_traits() {
  Traits t{.name = "example"};
  t.ops = op_bit(Op::send) | op_bit(Op::recv);
  t.dtypes = (DTypeSet{1} << kDTypeCount) - 1;  // it moves bytes
  t.guarantees = {.deadline = true,
                  .names_absent = true,
                  .detects_death = true,
                  .survives_death = true,
                  .revocable = true,
                  .quiesces = true};
  t.spin = false;  // a poll is a system call
  return t;
}

// A file begins with this; the elements follow.
struct Envelope {
  std::int32_t tag = 0;
  std::int32_t dtype = 0;
  std::int64_t count = 0;
};
constexpr std::uint64_t kLayout = sizeof(Envelope);  // ranks whose files differ refuse each other

// A file that a rank has locked as long as it lives: the kernel unlocks it when the process ends, however it ends.
class LifeLock {
 public:
  explicit LifeLock(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CREAT | O_CLOEXEC, 0600)) {
    if (fd_ < 0 || ::flock(fd_, LOCK_SH) != 0) throw_errno("example: cannot lock " + path, errno);
  }
  LifeLock(LifeLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  LifeLock& operator=(LifeLock&&) = delete;
  ~LifeLock() {
    if (fd_ >= 0) ::close(fd_);
  }

 private:
  int fd_;
};

// Where all ranks meet: rank 0 makes the folder and tells the others its name.
struct Meeting {
  std::string folder;
  HostRanks ranks;
  LifeLock alive;
};

constexpr const char* kFolderName = "weft-example-";
std::string alive_in(const std::string& folder) { return folder + "/alive"; }

// Removes the folders of ranks that were all killed: nobody has a lock there. One without the file is being made.
void remove_abandoned() {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::temp_directory_path(), ignored)) {
    if (entry.path().filename().string().rfind(kFolderName, 0) != 0) continue;
    const int fd = ::open(alive_in(entry.path().string()).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) fs::remove_all(entry.path(), ignored);
    ::close(fd);
  }
}

// The lock is held before the file has its name: so it is never seen without.
std::pair<std::string, LifeLock> make_folder() {
  remove_abandoned();
  std::string name = (fs::temp_directory_path() / (std::string(kFolderName) + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr) throw_errno("example: cannot make " + name, errno);
  LifeLock lock(alive_in(name) + ".new");
  fs::rename(alive_in(name) + ".new", alive_in(name));
  return {name, std::move(lock)};
}

Meeting meet(const GroupInit& b) {
  std::optional<std::pair<std::string, LifeLock>> own;
  if (b.rank == 0) own.emplace(make_folder());
  const std::string made = own ? own->first : std::string();
  try {
    // "folder\naddress"
    std::vector<std::string> infos = join(b, "example", made + "\n" + HostRanks::address(b), kLayout);
    const std::string folder = infos[0].substr(0, infos[0].find('\n'));
    for (std::string& info : infos) info.erase(0, info.find('\n') + 1);
    Meeting meeting{folder, HostRanks(b, infos), own ? std::move(own->second) : LifeLock(alive_in(folder))};
    for (int r = 0; r < b.size; ++r)
      if (!meeting.ranks.is_here(r))
        throw Error(ErrorCode::unsupported, "group \"" + b.name + "\": rank " + std::to_string(r) +
                                                " is on another host, or another user's; expected one host "
                                                "[rank " +
                                                std::to_string(b.rank) + "]");
    return meeting;
  } catch (...) {
    std::error_code ignored;
    if (!made.empty()) fs::remove_all(made, ignored);
    throw;
  }
}

class FileBackend final : public Backend {
 public:
  explicit FileBackend(const GroupInit& b)
      : rank_(b.rank),
        size_(b.size),
        meeting_(meet(b)),
        cause_(b.size > 1 ? b.store : nullptr, b.token),
        matcher_(b.size, UnexpectedLimits::from_env()),
        sent_(static_cast<std::size_t>(b.size)),
        seen_(static_cast<std::size_t>(b.size)),
        answered_(static_cast<std::size_t>(b.size)),
        roll_call_(b.rank, b.size) {}

  // Whoever leaves last removes the folder.
  ~FileBackend() override {
    std::ofstream(left(rank_)).close();
    meeting_.ranks.ring_all();  // who waits for this rank looks whether it has left
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && !has_left(r) && meeting_.ranks.alive(r)) return;
    std::error_code ignored;
    fs::remove_all(meeting_.folder, ignored);
  }

  const Traits& traits() const noexcept override { return traits_; }

  // A send is done when its file is there, at once.
  void post(OpState& s) noexcept override {
    Transfer& t = *new (s.scratch.data()) Transfer;
    try {
      std::uint64_t n = 0;
      if (s.op == Op::send) {
        write(s);
        t.done = true;
      } else if (matcher_.take_message(s.peer, s.tag, [&](std::uint64_t number) { n = number; })) {
        read(s, n);
      } else {
        matcher_.post(s.peer, s.tag, s);
      }
    } catch (const std::exception& e) {
      fail({.code = ErrorCode::system, .text = e.what(), .ranks = {rank_}});
    }
  }
  Step poll(OpState& s) noexcept override {
    if (failed_) return Step::failed;
    if (s.op == Op::recv && !Transfer::of(s).done) look(s.peer);
    if (Transfer::of(s).done) return Step::done;
    return failed_ ? Step::failed : Step::pending;
  }

  void fail(const Failure& why) noexcept override {
    learn(cause_.raise(why));
    meeting_.ranks.ring_all();
    wake(rank_);
  }
  // A rank that has died is lost to all. One that has left is lost to whoever waits for a message of it.
  bool healthy() noexcept override {
    if (failed_) return false;
    if (const auto cause = cause_.look()) learn(*cause);
    for (int r = 0; r < size_ && !failed_; ++r) {
      if (r == rank_) continue;
      const bool alive = meeting_.ranks.alive(r);
      if (has_left(r)) {  // in this order: it marks that it leaves before it ends
        look(r);          // what it sent before it left
        if (matcher_.awaits(r)) lose(r, "has left the group");
      } else if (!alive) {
        lose(r, "has died");
      }
    }
    return !failed_;
  }
  Failure failure() const override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    if (s.op != Op::recv) return {};
    std::vector<int> ranks{s.peer};  // or those who hold that one up
    story = tell(ranks, roll_call_.found(ranks), [](std::span<const int> who) {
      return name_ranks(who) + (who.size() == 1 ? " has not sent it" : " have not sent it");
    });
    return ranks;
  }
  std::vector<int> gone() const noexcept override {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && (has_left(r) || !meeting_.ranks.alive(r))) ranks.push_back(r);
    return ranks;
  }

  // The roll-call, before a time-out names anybody: this rank writes a number into a file for each other rank; a
  // rank that waits writes the number back, and whom it waits for.
  bool ask(const OpState& s) noexcept override try {
    if (s.op != Op::recv) return true;
    if (const std::uint32_t number = roll_call_.begin(s.op, s.call))
      each_other([&](int r) { put(note("ask", rank_, r), number, {}); });
    each_other([&](int r) {
      std::uint32_t number = 0;
      const std::vector<std::byte> awaits = get(note("answer", r, rank_), number);
      if (number != 0) roll_call_.answered(r, number, awaits);
    });
    return roll_call_.settled({&s.peer, 1});
  } catch (const std::exception&) {
    return true;  // the disk is full, say: then without it
  }
  void answer() noexcept override try {
    each_other([&](int r) {
      std::uint32_t number = 0;
      get(note("ask", r, rank_), number);
      std::uint32_t& answered = answered_[static_cast<std::size_t>(r)];
      if (number == answered) return;
      std::vector<int> awaited;
      each_other([&](int q) {
        if (matcher_.awaits(q)) awaited.push_back(q);
      });
      put(note("answer", rank_, r), number, RollCallMessages::encode(awaited, size_));
      answered = number;
    });
  } catch (const std::exception&) {  // who asked goes on without it
  }

  // No peer ever touches this rank's memory; this rank does, inside post() and poll().
  bool quiet() const noexcept override { return !inside_; }
  bool quiesce(Deadline deadline, std::span<const MemoryRange>) noexcept override {
    while (!quiet() && !deadline.passed()) ::usleep(100);
    return quiet();
  }
  // Senders ring always, so they need not know who sleeps.
  void announce_sleep(bool) noexcept override {}

 private:
  struct Transfer {  // in OpState::scratch
    bool done = false;
    static Transfer& of(OpState& s) noexcept {
      return *std::launder(reinterpret_cast<Transfer*>(s.scratch.data()));
    }
  };

  std::string file(int from, int to, std::uint64_t n) const {
    return meeting_.folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(n);
  }
  std::string left(int r) const { return meeting_.folder + "/left-" + std::to_string(r); }
  bool has_left(int r) const noexcept { return ::access(left(r).c_str(), F_OK) == 0; }

  void write(const OpState& s) {
    const std::string name = file(rank_, s.peer, sent_[static_cast<std::size_t>(s.peer)]++);
    const Envelope envelope{s.tag, static_cast<std::int32_t>(s.dtype), s.in_count};
    std::ofstream out(name + ".new", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&envelope), sizeof envelope);
    out.write(reinterpret_cast<const char*>(s.in), s.in_count * size_bytes(s.dtype));
    out.close();
    if (!out) throw std::runtime_error("example: cannot write " + name);
    fs::rename(name + ".new", name);  // the receiver sees whole files only
    wake(s.peer);
  }

  // Takes what has come from that rank, in order: to the receive that waits for it, or as unexpected.
  void look(int source) noexcept {
    try {
      for (std::uint64_t& n = seen_[static_cast<std::size_t>(source)];
           !failed_ && ::access(file(source, rank_, n).c_str(), R_OK) == 0; ++n) {
        Envelope envelope;
        std::ifstream(file(source, rank_, n), std::ios::binary)
            .read(reinterpret_cast<char*>(&envelope), sizeof envelope);
        const std::int64_t bytes = envelope.count * size_bytes(static_cast<DType>(envelope.dtype));
        if (OpState* const receive = matcher_.take_receive(source, envelope.tag))
          read(*receive, n);
        else if (matcher_.has_room(bytes))
          matcher_.keep(source, envelope.tag, bytes) = n;
        else
          fail(matcher_.refusal(rank_, source, envelope.tag, bytes));
      }
    } catch (const std::exception& e) {
      fail({.code = ErrorCode::system, .text = e.what(), .ranks = {rank_}});
    }
  }

  // Copies message n of its source into the receive's memory; not after a failure.
  void read(OpState& s, std::uint64_t n) {
    const std::string name = file(s.peer, rank_, n);
    std::ifstream in(name, std::ios::binary);
    Envelope envelope;
    in.read(reinterpret_cast<char*>(&envelope), sizeof envelope);
    const auto dtype = static_cast<DType>(envelope.dtype);
    if (dtype != s.dtype || envelope.count != s.out_count) {
      const auto words = [](std::int64_t count, DType t) {
        return std::string(weft::name(t)) + " x" + std::to_string(count);
      };
      fail({.code = ErrorCode::mismatch,
            .text = "rank " + std::to_string(s.peer) + " sent " + words(envelope.count, dtype) + ", rank " +
                    std::to_string(rank_) + " receives " + words(s.out_count, s.dtype),
            .op = s.op,
            .call = s.call,
            .ranks = {std::min(s.peer, rank_), std::max(s.peer, rank_)}});
      return;
    }
    inside_ = true;  // before the look at failed_: a thread that fails the group sees it
    if (!failed_) in.read(reinterpret_cast<char*>(s.out), s.out_count * size_bytes(s.dtype));
    inside_ = false;
    if (!in) throw std::runtime_error("example: cannot read " + name);
    fs::remove(name);
    Transfer::of(s).done = true;
  }

  // A note that one rank leaves for another: a number, then bytes. Each has one reader, which reads a whole one,
  // or none.
  std::string note(const char* what, int from, int to) const {
    return meeting_.folder + "/" + what + "-" + std::to_string(from) + "-" + std::to_string(to);
  }
  void put(const std::string& name, std::uint32_t number, const std::vector<std::byte>& bytes) const {
    std::ofstream out(name + ".new", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&number), sizeof number);
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    out.close();
    if (!out) throw std::runtime_error("example: cannot write " + name);
    fs::rename(name + ".new", name);
    meeting_.ranks.ring_all();
  }
  std::vector<std::byte> get(const std::string& name, std::uint32_t& number) const {
    std::ifstream in(name, std::ios::binary);
    in.read(reinterpret_cast<char*>(&number), sizeof number);
    if (!in) number = 0;  // there is none
    std::vector<std::byte> bytes;
    for (char c = 0; in.get(c);) bytes.push_back(static_cast<std::byte>(c));
    return bytes;
  }
  template <class F>
  void each_other(const F& f) const {
    for (int r = 0; r < size_; ++r)
      if (r != rank_) f(r);
  }

  void wake(int r) const noexcept {
    if (const Doorbell bell = meeting_.ranks.doorbell(r)) bell.ring();  // none: its process has ended
  }
  void lose(int r, const char* how) noexcept {
    fail({.code = ErrorCode::peer_lost, .text = "rank " + std::to_string(r) + " " + how, .ranks = {r}});
  }
  void learn(const Failure& cause) noexcept {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    failure_ = cause;
    failed_ = true;
  }

  const Traits traits_ = example_traits();
  const int rank_, size_;
  const Meeting meeting_;
  const FirstCause cause_;
  MessageMatcher<OpState, std::uint64_t> matcher_;  // a message is the number of its file
  std::vector<std::uint64_t> sent_, seen_;          // messages to and from each rank
  std::vector<std::uint32_t> answered_;             // the last question of each rank that has an answer
  RollCallMessages roll_call_;
  std::atomic<bool> inside_{false}, failed_{false};
  mutable std::mutex mutex_;  // fail() and failure() come from any thread
  Failure failure_;
};

}  // namespace

WEFT_BACKEND_PLUGIN {
  static const BackendPlugin plugin{
      .name = "example",
      .version = "files in a folder",
      .make = [](const GroupInit& b) -> std::unique_ptr<Backend> { return std::make_unique<FileBackend>(b); },
      .traits = example_traits};
  return &plugin;
}
