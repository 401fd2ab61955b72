// The smallest useful transport: messages are files in a folder. It can send and receive; every collective is
// composed by weft. Read docs/backends.md beside it.
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <tuple>

#include "weft/backends/plugin.hpp"

namespace {

namespace fs = std::filesystem;
using namespace weft;

Traits example_traits() {
  Traits t{.name = "example"};
  t.ops = op_bit(Op::send) | op_bit(Op::recv);
  t.dtypes = (DTypeSet{1} << kDTypeCount) - 1;  // it moves bytes
  t.guarantees = {.deadline = true, .survives_death = true, .revocable = true, .quiesces = true};
  t.spin = false;   // a poll is a system call
  t.rings = false;  // nobody tells a sleeper of a new file
  return t;
}

class FileBackend final : public Backend {
 public:
  // All ranks come here. Rank 0 makes the folder, the store tells the others.
  explicit FileBackend(const GroupInit& b) : store_(b.store), token_(b.token), rank_(b.rank), size_(b.size) {
    if (size_ == 1) {
      folder_ = make_folder();
      return;
    }
    if (rank_ == 0) store_->set(token_ + "/folder", make_folder());
    folder_ = store_->get(token_ + "/folder", b.deadline);
    store_->add(token_ + "/joined", 1);
    while (store_->add(token_ + "/joined", 0) < size_) {
      if (b.deadline.passed())
        throw Error(ErrorCode::timeout, "group \"" + b.name + "\": not all ranks joined");
      ::usleep(1000);
    }
  }
  // Whoever leaves last removes the folder.
  ~FileBackend() override {
    try {
      if (size_ == 1 || store_->add(token_ + "/left", 1) == size_) fs::remove_all(folder_);
    } catch (const std::exception&) {}
  }

  const Traits& traits() const noexcept override { return traits_; }

  // A message is done when its file is there: a send at once, a receive when poll() finds it. The n-th
  // receive from a rank with a tag takes the n-th message.
  void post(OpState& s) noexcept override {
    const bool sends = s.op == Op::send;
    const std::uint64_t n = counts_[{sends, s.peer, s.tag}]++;
    std::memcpy(s.scratch.data(), &n, sizeof(n));
    if (sends) write(s, n);
  }
  Step poll(OpState& s) noexcept override {
    if (failed()) return Step::failed;
    if (s.op == Op::send) return Step::done;
    std::uint64_t n = 0;
    std::memcpy(&n, s.scratch.data(), sizeof(n));
    return read(s, n);
  }

  // A failure is a key in the store, where the first one stays.
  void fail(const Failure& why) noexcept override {
    try {
      const std::string text = std::to_string(static_cast<int>(why.code)) + why.text;
      learn(size_ == 1 ? text : store_->compare_set(token_ + "/failure", "", text));
    } catch (const std::exception&) {  // the store is gone
      learn(std::to_string(static_cast<int>(why.code)) + why.text);
    }
  }
  bool healthy() noexcept override {
    try {
      if (size_ > 1 && !failed())
        if (const auto text = store_->try_get(token_ + "/failure")) learn(*text);
    } catch (const std::exception&) {}
    return !failed();
  }
  Failure failure() const override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    story = "rank " + std::to_string(s.peer) + " has not sent it";
    return {s.peer};
  }

  // Files are read and written inside post() and poll() alone, so after a failure nobody touches anything.
  bool quiet() const noexcept override { return true; }
  bool quiesce(Deadline, std::span<const MemoryRange>) noexcept override { return true; }
  void announce_sleep(bool) noexcept override {}

 private:
  static std::string make_folder() {
    std::string name = (fs::temp_directory_path() / "weft-example-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw_errno("example: cannot make " + name, errno);
    return name;
  }
  std::string file(int from, int to, int tag, std::uint64_t n) const {
    return folder_ + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(tag) + "-" +
           std::to_string(n);
  }
  void write(const OpState& s, std::uint64_t n) noexcept {
    try {
      const std::string name = file(rank_, s.peer, s.tag, n);
      std::ofstream out(name + ".new", std::ios::binary);
      out.write(reinterpret_cast<const char*>(s.in), s.in_count * size_bytes(s.dtype));
      out.close();
      if (!out) throw std::runtime_error("cannot write " + name);
      fs::rename(name + ".new", name);  // the receiver sees whole files only
    } catch (const std::exception& e) {
      fail({.code = ErrorCode::system, .text = e.what(), .ranks = {rank_}});
    }
  }
  Step read(OpState& s, std::uint64_t n) noexcept {
    try {
      const std::string name = file(s.peer, rank_, s.tag, n);
      if (::access(name.c_str(), R_OK) != 0) return Step::pending;
      const std::int64_t bytes = s.out_count * size_bytes(s.dtype);
      if (const auto sent = static_cast<std::int64_t>(fs::file_size(name)); sent != bytes) {
        fail({.code = ErrorCode::mismatch,
              .text = "rank " + std::to_string(s.peer) + " sent " + std::to_string(sent) + " bytes, rank " +
                      std::to_string(rank_) + " receives " + std::to_string(bytes),
              .op = s.op,
              .call = s.call,
              .ranks = {s.peer, rank_}});
        return Step::failed;
      }
      std::ifstream(name, std::ios::binary).read(reinterpret_cast<char*>(s.out), bytes);
      fs::remove(name);
      return Step::done;
    } catch (const std::exception& e) {
      fail({.code = ErrorCode::system, .text = e.what(), .ranks = {rank_}});
      return Step::failed;
    }
  }
  bool failed() const noexcept {
    const std::lock_guard lock(mutex_);
    return failed_;
  }
  void learn(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    failure_ = {.code = static_cast<ErrorCode>(text.at(0) - '0'), .text = text.substr(1), .ranks = {}};
    failed_ = true;
  }

  const Traits traits_ = example_traits();
  const std::shared_ptr<Store> store_;
  const std::string token_;
  const int rank_, size_;
  std::string folder_;
  std::map<std::tuple<bool, int, int>, std::uint64_t> counts_;
  mutable std::mutex mutex_;  // fail() and failure() come from any thread
  bool failed_ = false;
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
