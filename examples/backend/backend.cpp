// A minimal transport: byte streams between pairs of ranks, here named pipes in a folder. weft does the rest
// (weft/backends/stream_backend.hpp): it matches messages, including receives from any source, composes every
// collective of messages, keeps deadlines, names the rank that blocks the others, and notices ranks that
// leave or die. docs/backends.md explains it.
#include "weft/backends/stream_backend.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/backends/plugin.hpp"

namespace {

namespace fs = std::filesystem;
using namespace weft;

constexpr const char* kName = "example";
constexpr const char* kFolderName = "weft-example-";

[[noreturn]] void cannot(const std::string& what) { throw_errno("example: cannot " + what, errno); }

// An open file. The destructor closes it.
class File {
 public:
  File() = default;
  File(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {
    if (fd_ < 0) cannot("open " + path);
  }
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const noexcept { return fd_; }

 private:
  int fd_ = -1;
};

// The folder that holds the pipes of a group. Rank 0 makes the folder and sends its name to the other ranks.
// When all ranks have opened their pipes, rank 0 removes the folder. Until then rank 0 holds a lock on the
// file "alive" in it. The kernel releases the lock when the process ends, even if it is killed, so other
// processes can recognise abandoned folders.
class Folder {
 public:
  explicit Folder(int ranks) {
    remove_abandoned();
    path_ = (fs::temp_directory_path() / (std::string(kFolderName) + "XXXXXX")).string();
    if (::mkdtemp(path_.data()) == nullptr) cannot("make " + path_);
    try {
      // Takes the lock before the file gets its name, so that no process ever sees the file unlocked.
      alive_ = File(alive_in(path_) + ".new", O_RDONLY | O_CREAT);
      if (::flock(alive_.fd(), LOCK_SH) != 0) cannot("lock " + alive_in(path_));
      fs::rename(alive_in(path_) + ".new", alive_in(path_));
      for (int from = 0; from < ranks; ++from)
        for (int to = 0; to < ranks; ++to)
          if (from != to && ::mkfifo(pipe(path_, from, to).c_str(), 0600) != 0)
            cannot("make a pipe in " + path_);
    } catch (...) {
      remove(path_);
      throw;
    }
  }
  ~Folder() { remove(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const noexcept { return path_; }
  static std::string pipe(const std::string& folder, int from, int to) {
    return folder + "/" + std::to_string(from) + "-" + std::to_string(to);
  }

 private:
  static std::string alive_in(const std::string& folder) { return folder + "/alive"; }
  static void remove(const std::string& path) noexcept {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  // Removes folders whose file "alive" is not locked. A folder without this file is still being made.
  static void remove_abandoned() {
    std::error_code ignored;
    for (const fs::directory_entry& entry : fs::directory_iterator(fs::temp_directory_path(), ignored)) {
      const std::string path = entry.path().string();
      if (entry.path().filename().string().rfind(kFolderName, 0) != 0) continue;
      const int fd = ::open(alive_in(path).c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0) continue;
      if (::flock(fd, LOCK_EX | LOCK_NB) == 0) remove(path);
      ::close(fd);
    }
  }

  std::string path_;
  File alive_;
};

// One pipe for each direction of each pair of ranks. Both ends open the pipe for reading and writing. So
// opening does not wait for the other end, and writing to a rank that has left raises no signal.
class Pipes final : public ByteStreams {
 public:
  Pipes(const std::string& path, int rank, int size, std::shared_ptr<Folder> folder)
      : folder_(std::move(folder)),
        in_(static_cast<std::size_t>(size)),
        out_(static_cast<std::size_t>(size)) {
    constexpr int kFlags = O_RDWR | O_NONBLOCK;
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      in_[static_cast<std::size_t>(r)] = File(Folder::pipe(path, r, rank), kFlags);
      out_[static_cast<std::size_t>(r)] = File(Folder::pipe(path, rank, r), kFlags);
    }
  }
  std::size_t write(int to, const std::byte* bytes, std::size_t most) override {
    return moved(::write(out_[static_cast<std::size_t>(to)].fd(), bytes, most), "write to a pipe");
  }
  std::size_t read(int from, std::byte* bytes, std::size_t most) override {
    return moved(::read(in_[static_cast<std::size_t>(from)].fd(), bytes, most), "read from a pipe");
  }
  void all_open() override { folder_.reset(); }

 private:
  static std::size_t moved(ssize_t bytes, const char* what) {
    if (bytes >= 0) return static_cast<std::size_t>(bytes);
    if (errno != EAGAIN && errno != EINTR) cannot(what);
    return 0;  // the pipe is full, or empty
  }

  std::shared_ptr<Folder> folder_;  // of rank 0
  std::vector<File> in_, out_;      // by rank
};

std::unique_ptr<Backend> make(const GroupInit& b) {
  std::shared_ptr<Folder> folder;
  if (b.rank == 0) folder = std::make_shared<Folder>(b.size);
  return make_stream_backend(
      b, {.name = kName,
          .address = folder ? folder->path() : std::string(),
          .open = [&b, folder](std::span<const std::string> addresses) -> std::unique_ptr<ByteStreams> {
            return std::make_unique<Pipes>(addresses[0], b.rank, b.size, folder);
          }});
}

}  // namespace

WEFT_BACKEND_PLUGIN {
  static const BackendPlugin plugin{
      .name = kName, .version = "named pipes in a folder", .make = make, .traits = [] {
        return stream_traits(kName);
      }};
  return &plugin;
}
