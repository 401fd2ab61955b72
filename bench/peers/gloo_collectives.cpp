// Measures plain Gloo over TCP on loopback, its only transport between processes of one host, with the flags,
// checks, samples and rows of collectives_bench. Measures all_reduce by Gloo's ring and by its
// halving-doubling, and reports the better of the two.
//
//   gloo_collectives --ranks 2 --op all_reduce --rows
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/alltoall.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include "cases.hpp"
#include "processes.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

using Context = std::shared_ptr<::gloo::Context>;
using Call = std::function<void(std::byte* in, std::byte* out)>;

// The store through which Gloo's ranks find each other.
class Meeting final : public ::gloo::rendezvous::Store {
 public:
  explicit Meeting(std::shared_ptr<weft::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    store_->set(key, {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = store_->get(key, Deadline::after(std::chrono::seconds(30)));
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }

 private:
  std::shared_ptr<weft::Store> store_;
};

template <class T>
struct As {
  using type = T;
};
// Calls f with the C++ type of a dtype; returns false if Gloo has no such type.
template <class F>
bool with_type(DType t, const F& f) {
  if (t == DType::f32) return f(As<float>{}), true;
  if (t == DType::f64) return f(As<double>{}), true;
  if (t == DType::i8) return f(As<std::int8_t>{}), true;
  if (t == DType::u8) return f(As<std::uint8_t>{}), true;
  if (t == DType::i32) return f(As<std::int32_t>{}), true;
  if (t == DType::i64) return f(As<std::int64_t>{}), true;
  return false;
}

std::string obstacle(const Case& c) {
  if (!with_type(c.dtype, [](auto) {})) return "Gloo's reductions have no " + std::string(name(c.dtype));
  if (c.kind == Kind::reduce_scatter) return "Gloo's reduce_scatter is not measured: it destroys its input";
  return "";
}

Call messages_of(const Case& c, const Context& context, int rank) {
  const std::size_t bytes = static_cast<std::size_t>(c.moved_bytes());
  return [=, slot = std::uint64_t{1} << 40](std::byte* in, std::byte* out) mutable {
    const auto send = [&](std::byte* p, std::size_t n) {
      const auto b = context->createUnboundBuffer(p, n);
      b->send(1 - rank, slot);
      b->waitSend();
    };
    const auto receive = [&](std::byte* p, std::size_t n) {
      const auto b = context->createUnboundBuffer(p, n);
      b->recv(1 - rank, slot);
      b->waitRecv();
    };
    ++slot;
    if (c.kind == Kind::ping_pong) {
      if (rank == 0) send(in, bytes), receive(out, bytes);
      if (rank == 1) receive(out, bytes), send(in, bytes);
      return;
    }
    // Several messages at once, as many programs would send them.
    std::vector<std::unique_ptr<::gloo::transport::UnboundBuffer>> window;
    for (int k = 0; k < kWindow; ++k) {
      window.push_back(context->createUnboundBuffer(rank == 0 ? in : out, bytes));
      if (rank == 0) window.back()->send(1, slot + static_cast<std::uint64_t>(k));
      if (rank == 1) window.back()->recv(0, slot + static_cast<std::uint64_t>(k));
    }
    for (const auto& b : window)
      if (rank == 0) {
        b->waitSend();
      } else {
        b->waitRecv();
      }
    slot += kWindow;
    if (rank == 0) receive(out, 1);
    if (rank == 1) send(in, 1);
  };
}

Call call_of(const Case& c, const Context& context, int rank) {
  if (is_message(c.kind)) return messages_of(c, context, rank);
  Call call;
  with_type(c.dtype, [&](auto as) {
    using T = typename decltype(as)::type;
    const auto n_in = static_cast<std::size_t>(c.in_count()), n_out = static_cast<std::size_t>(c.out_count());
    call = [=](std::byte* in_bytes, std::byte* out_bytes) {
      T *const in = reinterpret_cast<T*>(in_bytes), *const out = reinterpret_cast<T*>(out_bytes);
      const auto sum = [](void* x, const void* a, const void* b, std::size_t n) {
        ::gloo::sum<T>(x, a, b, n);
      };
      switch (c.kind) {
        case Kind::all_reduce: {
          ::gloo::AllreduceOptions o(context);
          o.setAlgorithm(::gloo::AllreduceOptions::Algorithm::RING);
          if (!c.in_place) o.setInput(in, n_in);
          o.setOutput(out, n_out);
          o.setReduceFunction(sum);
          return ::gloo::allreduce(o);
        }
        case Kind::reduce: {
          ::gloo::ReduceOptions o(context);
          if (!c.in_place) o.setInput(in, n_in);
          o.setOutput(out, n_out);
          o.setRoot(0);
          o.setReduceFunction(sum);
          return ::gloo::reduce(o);
        }
        case Kind::broadcast: {
          ::gloo::BroadcastOptions o(context);
          if (!c.in_place && rank == 0) o.setInput(in, n_in);
          o.setOutput(out, n_out);
          o.setRoot(0);
          return ::gloo::broadcast(o);
        }
        case Kind::all_gather: {
          ::gloo::AllgatherOptions o(context);
          if (c.in_place) {
            o.setOutput(in - rank * c.block(), n_out);
          } else {
            o.setInput(in, n_in);
            o.setOutput(out, n_out);
          }
          return ::gloo::allgather(o);
        }
        case Kind::all_to_all: {
          ::gloo::AlltoallOptions o(context);
          o.setInput(in, n_in);
          o.setOutput(out, n_out);
          return ::gloo::alltoall(o);
        }
        default: return;  // it has no such operation
      }
    };
  });
  return call;
}

// Gloo's older all_reduce, which is bound to a buffer and works only in place.
Prepared halving_doubling(const Case& c, const Context& context, const std::shared_ptr<Buffers>& buffers) {
  Prepared p = prepare(buffers, {});
  with_type(c.dtype, [&](auto as) {
    using T = typename decltype(as)::type;
    const auto algorithm = std::make_shared<::gloo::AllreduceHalvingDoubling<T>>(
        context, std::vector<T*>{reinterpret_cast<T*>(buffers->out(0))}, static_cast<int>(c.out_count()));
    p.run = [buffers, algorithm] { algorithm->run(); };
  });
  return p;
}

void body(const Spec& spec, int rank, const std::shared_ptr<weft::Store>& store) {
  bind_to_cores(rank, spec.ranks, spec.bind);
  auto context = std::make_shared<::gloo::rendezvous::Context>(rank, spec.ranks);
  ::gloo::transport::tcp::attr where;
  where.hostname = "127.0.0.1";
  auto device = ::gloo::transport::tcp::CreateDevice(where);
  Meeting meeting(store);
  context->connectFullMesh(meeting, device);
  context->setTimeout(std::chrono::hours(1));
  const Agree agree = [&context](std::int64_t mine) {
    ::gloo::BroadcastOptions o(context);
    o.setOutput(&mine, 1);
    o.setRoot(0);
    ::gloo::broadcast(o);
    return mine;
  };
  agree(0);
  if (rank == 0)
    spec.print_settings("gloo", "Debian's libgloo; all_reduce: the better of ring and halving/doubling");
  Turns turns(spec.turns);
  for (const Case& c : cases_of(spec)) {
    if (!turns.take()) return;
    Row row = row_of(c, "foreign");
    if (const std::string why = obstacle(c); !why.empty()) {
      if (rank == 0) print_unsupported(row, why);
      continue;
    }
    const auto buffers = std::make_shared<Buffers>(c, rank, allocate_pages);
    const bool both = c.kind == Kind::all_reduce && c.in_place && !c.rotating;
    const double seconds = both ? spec.seconds / 2 : spec.seconds;
    Times t = measure(prepare(buffers, call_of(c, context, rank)), agree, seconds);
    if (both) {
      const Times other = measure(halving_doubling(c, context, buffers), agree, seconds);
      if (other.median_us < t.median_us) t = other;
    }
    add_times(row, per_message(t, c.kind), c.moved_bytes(), bus_factor(c.kind, c.ranks));
    if (rank == 0) print(row);
  }
  turns.take();  // no rank leaves before the end
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  try {
    const Spec spec = parse_spec(argc, argv,
                                 {{Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::all_gather,
                                   Kind::reduce_scatter, Kind::all_to_all, Kind::ping_pong, Kind::one_way}});
    return run_processes(
        spec.ranks, [&](int rank, const std::shared_ptr<weft::Store>& store) { body(spec, rank, store); });
  } catch (const weft::Error& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return e.code() == weft::ErrorCode::bad_argument ? 2 : 1;
  }
}
