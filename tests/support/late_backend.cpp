#include "support/late_backend.hpp"

#include <memory>
#include <utility>

#include "backends/plugins/forwarding_backend.hpp"
#include "support/late_device.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/host/context.hpp"

namespace weft::test {
namespace {

class LateCollectives final : public ForwardingBackend {
 public:
  LateCollectives(std::unique_ptr<Backend> inner, LateDevice& device)
      : ForwardingBackend(std::move(inner)), device_(device), traits_(this->inner().traits()) {
    traits_.name = "late";
    traits_.device = true;
    traits_.device_index = device.device().index;
  }
  const Traits& traits() const noexcept override { return traits_; }
  void post(OpState& s) noexcept override {
    device_.catch_up(s.stream == Stream{} ? Stream(device_.device()) : s.stream);
    s.in = device_.bytes_of(s.in);
    s.out = device_.bytes_of(s.out);
    inner().post(s);
  }

 private:
  LateDevice& device_;
  Traits traits_;
};

}  // namespace

BackendFactory late_collectives() {
  return [](const GroupInit& b) -> std::unique_ptr<Backend> {
    auto& device = dynamic_cast<LateDevice&>(
        b.context.device({DeviceKind::cuda, static_cast<std::int16_t>(b.process_rank)}));
    return std::make_unique<LateCollectives>(load_backend(b.context, "shm")(b), device);
  };
}

}  // namespace weft::test
