// The file store: a log of changes that every process replays into its own table.
//
// The file is a header followed by records. A record has its length and a checksum. The process that holds
// the file's lock (flock) appends records. It never changes an existing one. Reading takes no lock. A record
// counts once it is complete, and stays complete. A writer that was killed may leave the beginning of a
// record at the end of the file. The next process that takes the lock removes this beginning. A record that
// is complete but wrong was not written by weft: this is an error, and the file is not repaired.
#include "weft/store/file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>

#include "base/signals.hpp"
#include "base/waits/suspension.hpp"
#include "store/duration_text.hpp"
#include "store/file_records.hpp"
#include "store/maker_process.hpp"
#include "store/own_file.hpp"
#include "store/table.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::size_t kPiece = std::size_t{4} << 20;               // bytes of the file that are read at once
constexpr Duration kLongestPause = std::chrono::milliseconds(10);  // between two looks at the file

/// The pauses between two looks at the file: short at first, then longer.
class Pause {
 public:
  void wait(Duration limit) {
    sleep_noticing(std::min(next_, limit));
    next_ = std::min(2 * next_, kLongestPause);
  }

 private:
  Duration next_ = std::chrono::microseconds(100);
};

class FileStore final : public Store {
 public:
  FileStore(const std::string& path, Duration patience, Deadline deadline)
      : path_(path), patience_(patience), file_(open_own_file("store", path, O_RDWR | O_CREAT)) {
    const Lock lock(*this, "opening it", deadline);
    catch_up(true);
  }
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    check(key);
    check_store_value(key, value);
    const std::lock_guard guard(mutex_);
    const Lock lock(*this, key_text(key), deadline);
    catch_up(true);
    append(StoreRecord::Change::set, key, value);
  }

  std::string get(std::string_view key, Deadline deadline) override {
    check(key);
    const Duration limit = deadline.left();
    for (Pause pause;; pause.wait(deadline.left())) {
      if (auto value = try_get(key, deadline)) return std::move(*value);
      if (deadline.passed()) throw Error(ErrorCode::timeout, timeout_text(key, limit));
    }
  }

  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    check(key);
    const std::lock_guard guard(mutex_);
    if (!catch_up(false)) {  // perhaps another process is writing: look again under the lock
      const Lock lock(*this, key_text(key), deadline);
      catch_up(true);
    }
    const std::string* const value = table_.find(key);
    return value ? std::optional(*value) : std::nullopt;
  }

  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    check(key);
    const std::lock_guard guard(mutex_);
    const Lock lock(*this, key_text(key), deadline);
    catch_up(true);
    const std::int64_t sum = table_.sum(key, delta);
    append(StoreRecord::Change::set, key, std::to_string(sum));
    return sum;
  }

  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    check(key);
    check_store_value(key, expected);
    check_store_value(key, desired);
    const std::lock_guard guard(mutex_);
    const Lock lock(*this, key_text(key), deadline);
    catch_up(true);
    const std::string* const held = table_.find(key);
    if ((held ? std::string_view(*held) : std::string_view()) != expected)
      return held ? *held : std::string();
    append(StoreRecord::Change::set, key, desired);
    return std::string(desired);
  }

  void remove(std::string_view key, Deadline deadline) override {
    check(key);
    const std::lock_guard guard(mutex_);
    const Lock lock(*this, key_text(key), deadline);
    catch_up(true);
    if (table_.find(key) != nullptr) append(StoreRecord::Change::remove, key, {});
  }

 private:
  void check(std::string_view key) const {
    maker_.check(path_);  // checked first, because in a forked child the mutex may be locked forever
    check_store_key(key);
  }

  /// The lock of the file, against other processes and other stores of this process. It polls, because
  /// flock() has no deadline and the process that holds the lock may be stopped.
  class Lock {
   public:
    Lock(const FileStore& store, const std::string& what, Deadline limit) : fd_(store.fd_) {
      const Duration patience = std::min(store.patience_, limit.left());
      const Deadline deadline = Deadline::after(patience);
      for (Pause pause; ::flock(fd_, LOCK_EX | LOCK_NB) != 0; pause.wait(deadline.left())) {
        if (errno != EWOULDBLOCK && errno != EINTR)
          throw_errno(fmt::format("store: cannot lock {}", store.path_), errno);
        if (deadline.passed())
          throw Error(ErrorCode::timeout,
                      fmt::format("store: {}: another process has held the lock of {} for {}", what,
                                  store.path_, shown_duration(patience)));
      }
    }
    ~Lock() { ::flock(fd_, LOCK_UN); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    const int fd_;
  };

  static std::string key_text(std::string_view key) { return "key " + shown_key(key); }

  std::size_t size() const {
    struct stat status {};
    if (::fstat(fd_, &status) != 0) throw_errno(fmt::format("store: {}", path_), errno);
    if (status.st_nlink == 0)
      throw Error(ErrorCode::peer_lost, fmt::format("store: the file {} was removed", path_));
    return static_cast<std::size_t>(status.st_size);
  }

  /// Reads the records that were appended since the last call. With `repair`, which needs the lock, it also
  /// begins a new file and removes an incomplete record of a killed writer. It throws if the file is damaged.
  /// Without `repair` it returns false if something is wrong with the file, or if a write is in progress.
  bool catch_up(bool repair) {
    const std::size_t end = size();
    if (end < at_) {
      if (!repair) return false;
      throw damaged(end, "it was cut short");
    }
    std::string bytes;  // the file's bytes from at_ on
    // Reads in pieces: if another program wrote to the file, it may have any size.
    for (bool more = true; more;) {
      const std::size_t had = bytes.size(), piece = std::min(kPiece, end - at_ - had);
      bytes.resize(had + piece);
      bytes.resize(had + read(bytes.data() + had, piece, at_ + had));
      more = bytes.size() == had + kPiece;
      std::string_view rest = bytes;
      if (at_ == 0) {
        if (rest.substr(0, kStoreFileHeader.size()) != kStoreFileHeader.substr(0, rest.size()))
          throw Error(ErrorCode::system, fmt::format("store: {} is not a weft store (it begins with {})",
                                                     path_, shown_key(rest.substr(0, 16))));
        if (rest.size() < kStoreFileHeader.size()) {
          if (repair) write(kStoreFileHeader, 0, "its header");
          if (repair) at_ = kStoreFileHeader.size();
          return true;
        }
        at_ = kStoreFileHeader.size();
        rest.remove_prefix(at_);
      }
      if (!take_records(rest, repair)) return false;
      bytes.erase(0, bytes.size() - rest.size());
    }
    if (repair && !bytes.empty() && ::ftruncate(fd_, static_cast<off_t>(at_)) != 0)
      throw_errno(fmt::format("store: cannot cut {} back to {} bytes", path_, at_), errno);
    return true;
  }

  /// Applies the records at the beginning of `rest`, which begins at at_ in the file, and removes them from
  /// `rest`. Returns false if the following bytes are no record.
  bool take_records(std::string_view& rest, bool repair) {
    for (;;) {
      const StoreRecord record = parse_record(rest);
      if (record.state == ParseState::more) return true;
      if (record.state == ParseState::bad) {
        if (!repair) return false;
        throw damaged(at_, record.why);
      }
      apply(record.change, record.key, record.value);
      rest.remove_prefix(record.bytes);
      at_ += record.bytes;
    }
  }

  void apply(StoreRecord::Change change, std::string_view key, std::string_view value) {
    if (change == StoreRecord::Change::set) {
      table_.set(key, value);
    } else {
      table_.remove(key);
    }
  }

  /// Called under the lock, after catching up.
  void append(StoreRecord::Change change, std::string_view key, std::string_view value) {
    if (change == StoreRecord::Change::set) table_.check_room(key, value);
    const std::string record = make_record(change, key, value);
    write(record, at_, key_text(key));
    at_ += record.size();
    apply(change, key, value);
  }

  /// Writes all bytes, or throws and leaves the file as it was.
  void write(std::string_view bytes, std::size_t at, const std::string& what) {
    const WithoutSizeSignal guard;
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t n =
          ::pwrite(fd_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(at + done));
      if (n >= 0) {
        done += static_cast<std::size_t>(n);
      } else if (errno != EINTR) {
        const int error_number = errno;
        // If this fails, the next writer removes the bytes.
        [[maybe_unused]] const int cut = ::ftruncate(fd_, static_cast<off_t>(at));
        throw_errno(fmt::format("store: cannot write {} to {}", what, path_), error_number);
      }
    }
  }

  std::size_t read(char* to, std::size_t bytes, std::size_t at) const {
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t n = ::pread(fd_, to + done, bytes - done, static_cast<off_t>(at + done));
      if (n == 0) break;
      if (n > 0) {
        done += static_cast<std::size_t>(n);
      } else if (errno != EINTR) {
        throw_errno(fmt::format("store: cannot read {}", path_), errno);
      }
    }
    return done;
  }

  Error damaged(std::size_t at, std::string_view why) const {
    return Error(ErrorCode::system, fmt::format("store: {} is damaged at byte {}: {}", path_, at, why));
  }

  const MakerProcess maker_;
  const std::string path_;
  const Duration patience_;
  const Descriptor file_;
  const int fd_ = file_.get();
  std::mutex mutex_;    // guards the members below, against threads
  std::size_t at_ = 0;  // bytes of the file that are in the table
  StoreTable table_;
};

}  // namespace

std::shared_ptr<Store> make_file_store(const std::string& path, Duration patience, Deadline deadline) {
  return std::make_shared<FileStore>(path, patience, deadline);
}

}  // namespace weft
