#include "weft/checkpoint/async.hpp"

#include <fmt/format.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors/caught.hpp"
#include "base/waits/suspension.hpp"
#include "checkpoint/agreement.hpp"
#include "checkpoint/save_plan.hpp"
#include "weft/base/error.hpp"

namespace weft {

struct AsyncCheckpoint::Impl {
  Impl(const DeviceMesh& mesh_in, Busy busy_in) : mesh(mesh_in), busy(busy_in) {
    if (mesh && !mesh.is_root())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("AsyncCheckpoint: mesh is {}, a part of {}; expected the whole",
                              to_string(mesh.shape()), to_string(mesh.root().shape())));
    if (ProcessGroup* const of_mesh = group_of(mesh)) own = of_mesh->duplicate();
    renew = false;
  }

  ProcessGroup* group() { return own ? &own : nullptr; }
  // Waits until nothing is being written. An Interrupt of this thread ends the wait, but not the save; the
  // next call reports the save's error.
  void await_writer() {
    const Deadline unless_interrupted = Deadline::after(std::chrono::hours(24 * 365));
    std::unique_lock lock(mutex);
    while (running && !unless_interrupted.passed()) ended.wait_for(lock, wait_piece());
    if (unless_interrupted.passed())
      throw Error(
          ErrorCode::timeout,
          fmt::format("the save of step {} in the background: it is still being written", plan.index.step));
  }
  void take_error() noexcept {
    if (writer.joinable()) writer.join();
    if (!failed) return;
    error = std::exchange(failed, nullptr);
    renew = true;
  }
  // Makes the writers' group again if the previous save has failed. A time-out or a lost rank has ended the
  // group, perhaps not on all ranks. Collective; no writer may be running.
  void renew_group() {
    ProcessGroup* const of_mesh = group_of(mesh);
    bool any = false;
    for (const std::uint64_t wanted : numbers_of_all(of_mesh, renew ? 1 : 0)) any = any || wanted != 0;
    if (!any) return;
    renew = true;  // until it is made
    own = {};
    if (of_mesh != nullptr) own = of_mesh->duplicate();
    renew = false;
  }
  // Copies of the entries, in memory of this object.
  void keep(std::vector<SafetensorsEntry>& entries);
  void write(SavePlan plan_in);

  const DeviceMesh mesh;
  const Busy busy;
  ProcessGroup own;               // for the threads that write alone
  bool renew = true;              // whether it has to be made again
  SavePlan plan;                  // of the save that is being written
  std::vector<std::byte> copied;  // its entries' memory
  std::thread writer;
  std::mutex mutex;
  std::condition_variable ended;
  std::atomic<bool> running = false;  // becomes false under the mutex
  std::exception_ptr failed;          // the writer's; read when it is joined
  std::exception_ptr error;           // not thrown yet
};

namespace {

// The alignment of a copy, sufficient for its elements.
constexpr std::size_t kAligned = 64;
std::size_t rounded(std::size_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

std::exception_ptr of_background(std::int64_t step, const std::exception_ptr& error) {
  const std::string where = fmt::format("the save of step {} in the background", step);
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    Failure failure;
    failure.code = e.code();
    failure.text = fmt::format("{}: {}", where, e.what());
    failure.ranks.assign(e.ranks().begin(), e.ranks().end());
    return std::make_exception_ptr(Error(std::move(failure)));
  } catch (...) {
    return std::make_exception_ptr(Error(ErrorCode::system, fmt::format("{}: {}", where, caught_words())));
  }
}

}  // namespace

void AsyncCheckpoint::Impl::keep(std::vector<SafetensorsEntry>& entries) {
  std::size_t bytes = 0;
  for (const SafetensorsEntry& entry : entries)
    bytes += rounded(static_cast<std::size_t>(entry.data.bytes()));
  if (copied.size() < bytes) {
    copied = {};  // before the larger one takes memory
    copied.resize(bytes);
  }
  std::byte* to = copied.data();
  for (SafetensorsEntry& entry : entries) {
    const auto size = static_cast<std::size_t>(entry.data.bytes());
    if (size > 0) std::memcpy(to, entry.data.data, size);
    entry.data.data = to;
    to += rounded(size);
  }
}

void AsyncCheckpoint::Impl::write(SavePlan plan_in) {
  plan = std::move(plan_in);
  plan.copies.clear();  // keep() has copied them, too
  const auto body = [this] {
    try {
      write_save(plan, group());
    } catch (...) {
      failed = of_background(plan.index.step, std::current_exception());
    }
    {
      const std::lock_guard lock(mutex);
      running = false;
    }
    ended.notify_all();
  };
  running = true;
  try {
    writer = std::thread(body);
  } catch (const std::system_error&) {  // no thread can be made, but the others wait for this rank
    body();
  }
}

AsyncCheckpoint::AsyncCheckpoint(const DeviceMesh& mesh, Busy busy)
    : impl_(std::make_unique<Impl>(mesh, busy)) {}

AsyncCheckpoint::~AsyncCheckpoint() {
  impl_->take_error();
  if (!impl_->error || !impl_->mesh) return;
  try {
    std::rethrow_exception(impl_->error);
  } catch (...) {
    impl_->mesh.context().log().write(LogLayer::dp, LogLevel::error, caught_words());
  }
}

bool AsyncCheckpoint::save(const std::filesystem::path& directory, std::int64_t step,
                           std::span<const NamedView> tensors, const CheckpointExtra& extra,
                           const SaveOptions& options) {
  return save_listed(
      *this, directory, step, [&] { return std::vector<NamedView>(tensors.begin(), tensors.end()); }, extra,
      options);
}

bool save_listed(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                 const std::function<std::vector<NamedView>()>& list, const CheckpointExtra& extra,
                 const SaveOptions& options) {
  AsyncCheckpoint::Impl& impl = *saves.impl_;
  ProcessGroup* const group = group_of(impl.mesh);
  if (impl.busy == AsyncCheckpoint::Busy::refuse)
    for (const std::uint64_t running : numbers_of_all(group, impl.running ? 1 : 0))
      if (running != 0) return false;
  try {
    impl.await_writer();
  } catch (const Error&) {
    fail_interrupted(group, "save_checkpoint", "this save is not begun");
    throw;
  }
  impl.take_error();
  agree(group, "save_checkpoint: the save before this one", "this one is not begun",
        std::exchange(impl.error, nullptr));
  impl.renew_group();
  impl.write(plan_save(directory, impl.mesh, step, list, extra, options,
                       [&](std::vector<SafetensorsEntry>& entries) { impl.keep(entries); }));
  return true;
}

void AsyncCheckpoint::wait() {
  impl_->await_writer();
  impl_->take_error();
  if (std::exception_ptr error = std::exchange(impl_->error, nullptr)) std::rethrow_exception(error);
}

bool AsyncCheckpoint::running() const noexcept { return impl_->running; }
const DeviceMesh& AsyncCheckpoint::mesh() const noexcept { return impl_->mesh; }

}  // namespace weft
