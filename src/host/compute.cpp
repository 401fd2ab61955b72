#include "weft/host/compute.hpp"

#include <fmt/format.h>

#include "host/dependents.hpp"
#include "weft/base/error.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {
namespace {

constexpr int kMaxThreads = 4096;  // more cores than any host has: a larger number is a mistake

}  // namespace

Compute::Compute(Context& context, int threads, Device device)
    : context_(&context), threads_(threads), runtime_(&context.device(device)) {
  if (threads < 1)
    throw Error(ErrorCode::bad_argument, fmt::format("compute: threads is {}; expected at least 1", threads));
  if (threads > kMaxThreads)
    throw Error(ErrorCode::bad_argument,
                fmt::format("compute: threads is {}; expected at most {}", threads, kMaxThreads));
  attachments_.emplace_back(
      typeid(Dependents::Entry),
      std::make_shared<Dependents::Entry>(context, fmt::format("a Compute of {}", to_string(device))));
  stream_ = runtime_->make_stream();
}

Compute::~Compute() {
  const auto finish = [&] {
    try {
      wait();
    } catch (const std::exception& e) {  // a destructor must not throw
      context_->log().write(LogLayer::host, LogLevel::warning, fmt::format("compute: {}", e.what()));
    }
  };
  finish();                                               // kernels on the stream use attached objects
  while (!attachments_.empty()) attachments_.pop_back();  // each object frees its memory on the stream
  finish();
  runtime_->destroy_stream(stream_);
}

void Compute::wait() const { runtime_->wait(stream_); }

void Compute::throw_elsewhere(std::string_view what, const Tensor& t) const {
  throw Error(ErrorCode::bad_argument,
              fmt::format("{} {}", what, elsewhere_text(t, stream_, "this Compute")));
}

}  // namespace weft
