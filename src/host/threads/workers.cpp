#include "host/threads/workers.hpp"

#include <fmt/format.h>

#include <system_error>

namespace weft::threads {

Workers::Workers(Compute& compute) {
  threads_.reserve(static_cast<std::size_t>(compute.threads() - 1));
  for (int i = 1; i < compute.threads(); ++i) {
    try {
      threads_.emplace_back([this] { serve(); });
      // fewer threads are enough, because results do not depend on their number
    } catch (const std::system_error& e) {
      compute.context().log().write(LogLayer::host, LogLevel::warning,
                                    fmt::format("compute: thread {} of {} cannot be made: {}; continuing "
                                                "with {} (limits: ulimit -u, the cgroup's pids.max, "
                                                "ulimit -v)",
                                                i + 1, compute.threads(), e.code().message(), i));
      return;
    }
  }
}

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::run(std::size_t count, const void* work, Call call) {
  {
    const std::lock_guard lock(mutex_);
    count_ = count;
    work_ = work;
    call_ = call;
    next_.store(0, std::memory_order_relaxed);
    busy_ = threads_.size();
    ++round_;
  }
  begin_.notify_all();
  take();
  std::unique_lock lock(mutex_);
  end_.wait(lock, [this] { return busy_ == 0; });
}

void Workers::serve() noexcept {
  std::uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      begin_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    take();
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) end_.notify_one();
  }
}

void Workers::take() noexcept {
  for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(work_, i);
}

}  // namespace weft::threads
