#include "rank/agreement.hpp"

#include <fmt/format.h>

#include <vector>

#include "weft/backends/call.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/window.hpp"

namespace weft::check {
namespace {

std::string differs(const char* what, double got, double expected) {
  if (got == expected) return {};
  return fmt::format("{} is {}; expected {}", what, got, expected);
}

std::string edge(const Step& s, ProcessGroup& group) {
  const int n = group.size();
  const DeviceMesh mesh(group, {{"y", n}});
  const Partition x(make_layout(mesh, {Shard{0}}, {n, 2}));
  const Window window(x, {WindowDim::halo(x, 0, 1, 1, s.differs ? Edge::replicate() : Edge::zero())});
  const std::vector<float> part(2, static_cast<float>(group.rank() + 1));
  std::vector<float> wide(6, -1);
  window.fetch(view(part.data(), {1, 2}), view(wide.data(), {3, 2}));
  const int before = group.rank(), after = group.rank() + 2;
  if (const std::string wrong = differs("the row before", wide[0], before); !wrong.empty()) return wrong;
  return differs("the row after", wide[4], after > n ? 0 : after);
}

std::string full_tensor(const Step& s, ProcessGroup& group) {
  const int n = group.size();
  const DeviceMesh mesh(group, {{"y", n}});
  const std::int64_t rows = s.differs ? 3 * n : 2 * n, columns = s.differs ? 2 * n : 3 * n;
  const LayoutRef layout = make_layout(mesh, {Shard{0}}, {rows, columns});
  Tensor local(group.context(), layout->local_shape(), DType::f32);
  for (std::int64_t i = 0; i < local.count(); ++i)
    local.data_ptr<float>()[i] = static_cast<float>(group.rank() * local.count() + i);
  const Tensor all = full(as_layout(local, layout));
  for (std::int64_t i = 0; i < all.count(); ++i)
    if (all.data_ptr<float>()[i] != static_cast<float>(i))
      return fmt::format("full(): [{}] is {}; expected {}", i, all.data_ptr<float>()[i], i);
  return {};
}

std::string axes(const Step& s, ProcessGroup& group) {
  const int n = group.size(), b = s.differs ? (n % 2 == 0 ? 2 : n) : 1;
  const DeviceMesh mesh(group, {{"a", n / b}, {"b", b}});
  float x = 1;
  mesh["a"].group().all_reduce(view(&x, 1)).wait();
  return differs("the sum over axis a", x, n / b);  // a rank alone on its axis hears of the others later
}

}  // namespace

std::string agree(const Step& s, ProcessGroup& group) {
  switch (s.value) {
    case Value::edge: return edge(s, group);
    case Value::full: return full_tensor(s, group);
    case Value::mesh: return axes(s, group);
    case Value::max_norm:
    case Value::saved:
    case Value::loaded: break;
  }
#ifdef WEFT_HAVE_CHECKPOINT
  return agree_on_saved(s, group);
#else
  return "weft was built without its layers dp and checkpoint";
#endif
}

std::string overlap(const Step& s, ProcessGroup& group, Duration deadline) {
  const int n = group.size(), next = (group.rank() + 1) % n, previous = (group.rank() + n - 1) % n;
  const CallOptions options{.deadline = deadline};
  std::vector<std::byte> memory(static_cast<std::size_t>((s.count + 1) * (n + 1) * size_bytes(s.dtype)));
  const auto part = [&](std::int64_t from, std::int64_t count) {
    return TensorView{
        memory.data() + from * size_bytes(s.dtype), s.dtype, {}, Dims::line(count), Dims::line(1)};
  };
  const TensorView x = part(0, s.count);
  std::vector<Call> calls;
  switch (s.overlap) {
    case Overlap::send_recv: calls = {call::send(x, next, options), call::recv(x, previous, options)}; break;
    case Overlap::send_recv_part:
      calls = {call::send(x, next, options), call::recv(part(s.count / 2, s.count), previous, options)};
      break;
    case Overlap::twice: calls = {call::all_reduce(x, options), call::all_reduce(x, options)}; break;
    case Overlap::read_written:
      calls = {call::all_gather(x, part(s.count, s.count * n), options), call::broadcast(x, 0, options)};
      break;
  }
  try {
    group.coalesced(calls).wait();
  } catch (const Error& e) {
    if (e.code() == ErrorCode::bad_argument) return {};
    throw;
  }
  return fmt::format("calls that overlap ({}) were not refused", name(s.overlap));
}

}  // namespace weft::check
