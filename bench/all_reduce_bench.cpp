// all_reduce of f32 between processes of one host, 8 bytes to 32 MB, in shared and in foreign memory, beside
// a memcpy of the same size. The same buffers every time: hot. `--ranks N` before the benchmark flags; two by
// default.
#include <cstdio>
#include <cstring>
#include <string>

#include "harness.hpp"
#include "weft/base/tensor.hpp"

namespace weft::bench {
namespace {

constexpr std::int64_t kSizes[] = {8,         256,       2 << 10, 8 << 10, 32 << 10,
                                   128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20};

// Small integers that depend on rank and index: a sum is exact, a misplaced block is seen.
float value(int rank, std::int64_t i) { return static_cast<float>((i * 7 + rank * 31) % 251); }

// In place the sums grow from run to run, which costs nothing; the first one is verified.
Prepared prepare(ProcessGroup& group, Memory memory, bool in_place, std::int64_t bytes) {
  struct Buffers {
    Tensor in, out;
  };
  const std::int64_t count = bytes / 4;
  const auto b = std::make_shared<Buffers>();
  b->in = Tensor(group.context(), Shape{count}, DType::f32, memory);
  b->out = in_place ? b->in : Tensor(group.context(), Shape{count}, DType::f32, memory);
  std::memset(b->out.data(), 0xff, static_cast<std::size_t>(bytes));
  for (std::int64_t i = 0; i < count; ++i) b->in.f32()[i] = value(group.rank(), i);
  Prepared p;
  p.run = [&group, b, in = ConstTensorView(b->in), out = TensorView(b->out)] {
    group.all_reduce(in, out).wait();
  };
  p.verify = [&group, b, count]() -> std::string {
    for (std::int64_t i = 0; i < count; ++i) {
      float want = 0;
      for (int r = 0; r < group.size(); ++r) want += value(r, i);
      if (b->out.f32()[i] != want)
        return "element " + std::to_string(i) + ": " + std::to_string(b->out.f32()[i]) + "; expected " +
               std::to_string(want);
    }
    return "";
  };
  return p;
}

// What one process takes to copy as many bytes: the plain baseline. All ranks copy at once, as they do in a
// collective.
Prepared prepare_copy(std::int64_t bytes) {
  const auto from = std::make_shared<std::vector<char>>(bytes, 'x'),
             to = std::make_shared<std::vector<char>>(bytes);
  return {[from, to] { std::memcpy(to->data(), from->data(), from->size()); },
          [from, to]() -> std::string { return *from == *to ? "" : "the copy differs"; }};
}

int body(int rank, int size, const std::shared_ptr<Store>& store, int argc, char** argv) {
  Bench bench(argc, argv, rank == 0);
  Context context;
  Membership m;
  m.store = store;
  m.rank = rank;
  m.size = size;
  m.deadline = std::chrono::seconds(30);
  ProcessGroup group = ProcessGroup::create(context, "shm", m);
  const double bus_factor = 2.0 * (size - 1) / size;
  const auto agree = [&group](bool more) {
    const float mine = more ? 1.0f : 0.0f;
    float first = 0;
    group.broadcast(view(&mine, 1), view(&first, 1), 0).wait();
    return first != 0;
  };
  for (const bool in_place : {false, true})
    for (const Memory memory : {Memory::shared, Memory::local})
      for (const std::int64_t bytes : kSizes)
        bench.add({std::string("all_reduce/f32/") + (memory == Memory::shared ? "shared/" : "foreign/") +
                       (in_place ? "in_place/" : "out_of_place/") + std::to_string(bytes),
                   bytes, bus_factor,
                   [&group, memory, in_place, bytes] { return prepare(group, memory, in_place, bytes); },
                   agree});
  for (const std::int64_t bytes : kSizes)
    bench.add({"memcpy/" + std::to_string(bytes), bytes, 1, [bytes] { return prepare_copy(bytes); }, agree});
  bench.run();
  group.barrier().wait();  // nobody leaves while another still has cases to run
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  int ranks = 2;
  if (argc > 2 && std::string(argv[1]) == "--ranks") {
    ranks = std::atoi(argv[2]);
    for (int i = 1; i + 2 < argc; ++i) argv[i] = argv[i + 2];
    argc -= 2;
  }
  if (ranks < 1 || ranks > 64) {
    std::fprintf(stderr, "all_reduce_bench: --ranks %d; expected 1 to 64\n", ranks);
    return 2;
  }
  return weft::bench::run_processes(ranks, [&](int rank, std::shared_ptr<weft::Store> store) {
    return weft::bench::body(rank, ranks, store, argc, argv);
  });
}
