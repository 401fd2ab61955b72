#include "support/late_backend.hpp"

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backends/plugins/forwarding_backend.hpp"
#include "support/late_device.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/host/context.hpp"

namespace weft::test {
namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating-point dtype

// The result of a call on the device: `result` at `out`, in these parts (bytes).
struct Output {
  struct Part {
    std::size_t at, bytes;
  };
  std::byte* out = nullptr;
  std::vector<std::byte> result;
  std::vector<Part> parts;

  void write() const {
    for (const Part& p : parts) {
      if (p.bytes > 0) std::memcpy(out + p.at, result.data() + p.at, p.bytes);
    }
  }
  void poison() const {
    for (const Part& p : parts) {
      if (p.bytes > 0) std::memset(out + p.at, kPoison, p.bytes);
    }
  }
};

// A call from its post to its end. The transport below works on copies of its buffers.
struct LateCall {
  OpState* s;
  Stream stream;
  bool begun = false, ready = false, given = false;  // the last: a stream writes the output
  std::vector<Stream> waiting;                       // streams that shall wait for it
  std::vector<std::byte> in;
  std::shared_ptr<Output> output = std::make_shared<Output>();
};

class LateCollectives final : public ForwardingBackend {
 public:
  LateCollectives(std::unique_ptr<Backend> inner, LateDevice& device, int ranks)
      : ForwardingBackend(std::move(inner)), device_(device), ranks_(ranks), traits_(this->inner().traits()) {
    traits_.name = "late";
    traits_.device = true;
    traits_.ops &= ~op_bit(Op::exchange);  // as NCCL: of messages
    traits_.device_index = device.device().index;
    traits_.progress = ProgressStyle::stream;
  }
  const Traits& traits() const noexcept override { return traits_; }
  void post(OpState& s) noexcept override {
    LateCall& call = calls_[&s];
    call = LateCall{};
    call.s = &s;
    call.stream = s.stream == Stream{} ? Stream(device_.device()) : s.stream;
    posted_.push_back(&s);
  }
  Step poll(OpState& s) noexcept override {
    LateCall& call = begin(s);
    if (!call.ready) {
      const Step step = inner().poll(s);
      if (step != Step::done) return step;
      call.ready = true;
    }
    if (!call.waiting.empty() && !call.given) return Step::advanced;  // wait_on() comes again
    device_.catch_up(call.stream);
    for (const Stream stream : call.waiting) device_.catch_up(stream);
    if (!call.given) call.output->write();
    calls_.erase(&s);
    return Step::done;
  }
  bool wait_on(OpState& s, Stream stream) noexcept override {
    LateCall& call = begin(s);
    if (stream == Stream{}) stream = device_.device();
    if (call.waiting.empty() || call.given) call.waiting.push_back(stream);
    if (!call.ready) return false;
    device_.push(stream, [output = call.output] { output->write(); });
    return call.given = true;
  }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    begin(const_cast<OpState&>(s));
    return inner().missing(s, story);
  }
  void batch(bool) noexcept override {}  // calls begin later

 private:
  // Begins all calls up to and including this one, in order.
  LateCall& begin(OpState& s) noexcept {
    LateCall& call = calls_[&s];
    while (!call.begun && !posted_.empty()) {
      LateCall& next = calls_[posted_.front()];
      posted_.pop_front();
      give(next);
    }
    return call;
  }
  void give(LateCall& call) noexcept {
    call.begun = true;
    OpState& s = *call.s;
    device_.catch_up(call.stream);
    const auto size = static_cast<std::size_t>(size_bytes(s.dtype));
    const std::size_t in_bytes = static_cast<std::size_t>(s.in_count) * size,
                      out_bytes = static_cast<std::size_t>(s.out_count) * size;
    Output& output = *call.output;
    if (s.in != nullptr) {
      const std::byte* const from = device_.bytes_of(s.in);
      call.in.assign(from, from + in_bytes);
      s.in = call.in.data();
    }
    if (s.out == nullptr) return inner().post(s);
    output.out = device_.bytes_of(s.out);
    output.result.assign(output.out, output.out + out_bytes);
    if (s.out_blocks == nullptr)
      output.parts = {{0, out_bytes}};
    else
      for (int r = 0; r < ranks_; ++r)
        output.parts.push_back({static_cast<std::size_t>(s.out_blocks[r].offset) * size,
                                static_cast<std::size_t>(s.out_blocks[r].count) * size});
    output.poison();
    s.out = output.result.data();
    inner().post(s);
  }

  LateDevice& device_;
  const int ranks_;
  Traits traits_;
  std::map<const OpState*, LateCall> calls_;
  std::deque<OpState*> posted_;  // not begun
};

}  // namespace

BackendFactory late_collectives() {
  return [](const GroupInit& b) -> std::unique_ptr<Backend> {
    auto& device = dynamic_cast<LateDevice&>(
        b.context.device({DeviceKind::cuda, static_cast<std::int16_t>(b.process_rank)}));
    return std::make_unique<LateCollectives>(load_backend(b.context, "shm")(b), device, b.size);
  };
}

}  // namespace weft::test
