// Compares the norm of gradients, clipping and packing, with 1 thread and with all threads of the machine, to
// a memcpy of as many bytes. bus_GBs counts every byte read and written.
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "harness.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/grad_norm.hpp"

namespace weft::bench {
namespace {

// Gradients with the sizes of a transformer's, `bytes` in all: some are large and many are small.
struct Gradients {
  Gradients(DType dtype, std::int64_t bytes, int threads) : compute(context, threads) {
    const std::int64_t elements = bytes / size_bytes(dtype);
    for (std::int64_t left = elements, large = elements / 16; left > 0;) {
      const std::int64_t count = std::min(left, list.size() % 2 == 0 ? large : large / 1024);
      memory.push_back(Tensor(context, {count}, dtype));
      list.push_back({"g", memory.back().view(), nullptr});
      left -= count;
    }
    renew();
  }
  void renew() {
    for (Tensor& t : memory) {
      if (t.dtype() == DType::f32)
        for (float& x : t.f32()) x = 1;
      else
        for (bf16& x : t.as<bf16>()) x = bf16(1.0f);
    }
  }
  double elements() const {
    double n = 0;
    for (const Tensor& t : memory) n += static_cast<double>(t.count());
    return n;
  }

  Context context;
  Compute compute;
  std::vector<Tensor> memory;
  std::vector<Gradient> list;
};

std::string wrong(double got, double expected) {
  return std::abs(got / expected - 1) < 1e-2
             ? ""
             : "norm " + std::to_string(got) + "; expected " + std::to_string(expected);
}

void add_norm(Bench& bench, DType dtype, std::int64_t bytes, int threads) {
  TableRow row;
  row.name = "grad_norm/" + std::string(name(dtype)) + "/" + std::to_string(bytes) + "/threads" +
             std::to_string(threads);
  row.bytes = bytes;
  row.prepare = [=] {
    auto g = std::make_shared<Gradients>(dtype, bytes, threads);
    return Prepared{[g] { grad_norm(g->list, 2, &g->compute); },
                    [g] { return wrong(grad_norm(g->list, 2, &g->compute), std::sqrt(g->elements())); }};
  };
  bench.add(std::move(row));
}

// Computes the norm and scales every element: reads each twice and writes it once.
void add_clip(Bench& bench, DType dtype, std::int64_t bytes, int threads) {
  TableRow row;
  row.name =
      "clip/" + std::string(name(dtype)) + "/" + std::to_string(bytes) + "/threads" + std::to_string(threads);
  row.bytes = bytes;
  row.bus_factor = 3;
  row.prepare = [=] {
    auto g = std::make_shared<Gradients>(dtype, bytes, threads);
    const auto norm = std::make_shared<double>(grad_norm(g->list));
    const auto clip = [g, norm] {  // always a little below the norm, so that every run scales
      *norm = clip_grad_norm(g->list, 0.9999 * *norm, 2, NonFinite::error, &g->compute);
    };
    return Prepared{clip, [g, norm] {
                      g->renew();
                      *norm = clip_grad_norm(g->list, 1, 2, NonFinite::error, &g->compute);
                      return wrong(grad_norm(g->list, 2, &g->compute), 1);
                    }};
  };
  bench.add(std::move(row));
}

// The copies that a BucketReducer makes of gradients in the caller's memory: into the bucket and back.
void add_packing(Bench& bench, std::int64_t bytes, int threads) {
  TableRow row;
  row.name = "packing/f32/" + std::to_string(bytes) + "/threads" + std::to_string(threads);
  row.bytes = bytes;
  row.bus_factor = 4;
  row.prepare = [=] {
    struct Packing {
      Packing(std::int64_t n, int t)
          : gradients(DType::f32, n, t),
            mesh(DeviceMesh::arithmetic(gradients.context, MeshShape{{"dp", 1}}, 0)) {
        std::vector<BucketEntry> entries;
        for (const Tensor& x : gradients.memory) entries.push_back({"g", x.count()});
        reducer = std::make_unique<BucketReducer>(
            mesh, entries, BucketOptions{.bucket_bytes = 2 * n, .compute = &gradients.compute});
        for (std::size_t i = 0; i < entries.size(); ++i) reducer->bind(i, gradients.memory[i].view());
      }
      void step() {
        for (std::size_t i = 0; i < reducer->size(); ++i) reducer->ready(i);
        reducer->finish();
      }
      Gradients gradients;
      DeviceMesh mesh;
      std::unique_ptr<BucketReducer> reducer;
    };
    auto p = std::make_shared<Packing>(bytes, threads);
    return Prepared{[p] { p->step(); },
                    [p] {
                      p->step();
                      return wrong(grad_norm(p->gradients.list), std::sqrt(p->gradients.elements()));
                    }};
  };
  bench.add(std::move(row));
}

void add_copy(Bench& bench, std::int64_t bytes) {
  TableRow row;
  row.name = "memcpy/" + std::to_string(bytes);
  row.bytes = bytes;
  row.bus_factor = 2;
  row.prepare = [=] {
    auto from = std::make_shared<std::vector<char>>(bytes, 'x'),
         to = std::make_shared<std::vector<char>>(bytes);
    return Prepared{[from, to] { std::memcpy(to->data(), from->data(), to->size()); },
                    [from, to] { return *from == *to ? std::string() : std::string("other bytes"); }};
  };
  bench.add(std::move(row));
}

void add_all(Bench& bench) {
  const int all = static_cast<int>(std::max(2u, std::thread::hardware_concurrency()));
  for (const std::int64_t bytes : {std::int64_t{1} << 20, std::int64_t{64} << 20}) {
    add_copy(bench, bytes);
    for (const int threads : {1, all}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        add_norm(bench, dtype, bytes, threads);
        add_clip(bench, dtype, bytes, threads);
      }
      add_packing(bench, bytes, threads);
    }
  }
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::bench::Bench bench(argc, argv);
  weft::bench::add_all(bench);
  bench.run();
}
