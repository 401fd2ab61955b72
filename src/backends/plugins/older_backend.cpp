#include "backends/plugins/older_backend.hpp"

#include <utility>

#include "backends/plugins/forwarding_backend.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
namespace {

// Removes operations from the plug-in's traits that were added after it was built. These traits may come from
// known_traits() of this newer weft.
class OlderBackend final : public ForwardingBackend {
 public:
  OlderBackend(std::uint32_t minor, std::unique_ptr<Backend> backend)
      : ForwardingBackend(std::move(backend)), minor_(minor), traits_(inner().traits()) {
    traits_.ops &= ~ops_after(minor);
  }
  const Traits& traits() const noexcept override { return traits_; }
  bool ask(const OpState& s) noexcept override { return minor_ < 1 || inner().ask(s); }
  void answer() noexcept override {
    if (minor_ >= 1) inner().answer();
  }
  std::vector<LastCall> last_calls() noexcept override {
    return minor_ < 3 ? std::vector<LastCall>() : inner().last_calls();
  }
  std::optional<MessageInfo> probe(int source, int tag) noexcept override {
    return minor_ < 3 ? std::nullopt : inner().probe(source, tag);
  }

 private:
  const std::uint32_t minor_;
  Traits traits_;
};

}  // namespace

OpSet ops_after(std::uint32_t minor) noexcept {
  return (minor < 2 ? op_bit(Op::scan) | op_bit(Op::exscan) : 0) |
         (minor < 3 ? op_bit(Op::wait_message) : 0) | (minor < 6 ? op_bit(Op::exchange) : 0);
}

std::unique_ptr<Backend> as_built_for(std::uint32_t minor, std::unique_ptr<Backend> backend) {
  if (backend == nullptr || minor >= 6) return backend;
  return std::make_unique<OlderBackend>(minor, std::move(backend));
}

}  // namespace weft
