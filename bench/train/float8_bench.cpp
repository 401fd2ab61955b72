// Casts to and from eight bits against a copy of the same memory: bytes read and written per second.
//
//   float8_bench [MiB of f32 per matrix, 128] [threads, 1]
//
// Each row is the best of 25 runs, in turn with a memcpy of the f32 matrix in the same threads; "of copy":
// the row's rate divided by that of the best of all copies. A matrix has 4096 columns. WEFT_CPU_ISA chooses
// the instructions.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "weft/base/random.hpp"
#include "weft/nn/float8.hpp"

namespace {

using namespace weft;
using float8::Granularity;

double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t columns = 4096, mib = argc > 1 ? std::atol(argv[1]) : 128;
  const std::int64_t rows = (mib << 20) / 4 / columns, count = rows * columns;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
  if (rows < 1 || threads < 1) {
    std::fprintf(stderr, "float8_bench: expected at least 1 MiB and 1 thread\n");
    return 1;
  }
  kernels::KernelContext ctx(threads);
  const Shape shape{rows, columns};
  const auto elements = static_cast<std::size_t>(count);
  std::vector<float> x(elements), copy(elements), amax(static_cast<std::size_t>(rows)),
      of_columns(static_cast<std::size_t>(columns));
  std::vector<bf16> half(elements), narrow(elements);
  std::vector<std::uint8_t> codes(elements);
  RandomStream(1, "float8_bench").normal(0, count, x.data());
  for (std::size_t i = 0; i < elements; ++i) narrow[i] = bf16(x[i]);
  TensorView to = view(codes.data(), shape);
  to.dtype = DType::f8e4m3;
  TensorView to_e5m2 = to;
  to_e5m2.dtype = DType::f8e5m2;
  const std::vector<float> by_row(static_cast<std::size_t>(rows), 90.0F),
      by_column(static_cast<std::size_t>(columns), 90.0F);

  const double bytes = static_cast<double>(count);
  const auto copy_all = [&] {
    std::vector<std::jthread> others;
    const auto part = [&](int t) {
      const std::int64_t begin = count * t / threads, end = count * (t + 1) / threads;
      std::memcpy(copy.data() + begin, x.data() + begin, static_cast<std::size_t>(end - begin) * 4);
    };
    for (int t = 1; t < threads; ++t) others.emplace_back(part, t);
    part(0);
  };
  struct Row {
    const char* name;
    double rate;
  };
  std::vector<Row> table;
  double copied = 1e9;
  const auto row = [&](const char* name, double bytes_per_element, const std::function<void()>& run) {
    double best = 1e9;
    for (int i = 0; i < 25; ++i) {
      copied = std::min(copied, seconds_of(copy_all));
      best = std::min(best, seconds_of(run));
    }
    table.push_back({name, bytes_per_element * bytes / best / 1e9});
  };
  const ConstTensorView from = view(x.data(), shape);
  const TensorView values = view(half.data(), shape);
  row("amax of f32, tensorwise", 4, [&] { float8::amax(ctx, from, Granularity::tensorwise, amax.data()); });
  row("amax of f32, rowwise", 4, [&] { float8::amax(ctx, from, Granularity::rowwise, amax.data()); });
  row("amax of f32, columnwise", 4,
      [&] { float8::amax(ctx, from, Granularity::columnwise, of_columns.data()); });
  row("f32 to codes, tensorwise", 5,
      [&] { float8::quantise(ctx, from, Granularity::tensorwise, by_row.data(), to); });
  row("f32 to codes, rowwise", 5,
      [&] { float8::quantise(ctx, from, Granularity::rowwise, by_row.data(), to); });
  row("f32 to codes, columnwise", 5,
      [&] { float8::quantise(ctx, from, Granularity::columnwise, by_column.data(), to); });
  row("f32 to values in bf16, rowwise", 6, [&] {
    float8::quantise_to_bf16(ctx, from, Granularity::rowwise, by_row.data(), DType::f8e4m3, values);
  });
  row("f32 to codes of e5m2, tensorwise", 5,
      [&] { float8::quantise(ctx, from, Granularity::tensorwise, by_row.data(), to_e5m2); });
  const ConstTensorView from_bf16 = view(narrow.data(), shape);
  row("amax of bf16, tensorwise", 2,
      [&] { float8::amax(ctx, from_bf16, Granularity::tensorwise, amax.data()); });
  row("amax of bf16, columnwise", 2,
      [&] { float8::amax(ctx, from_bf16, Granularity::columnwise, of_columns.data()); });
  row("bf16 to codes, tensorwise", 3,
      [&] { float8::quantise(ctx, from_bf16, Granularity::tensorwise, by_row.data(), to); });
  row("bf16 to codes, rowwise", 3,
      [&] { float8::quantise(ctx, from_bf16, Granularity::rowwise, by_row.data(), to); });
  row("bf16 to codes, columnwise", 3,
      [&] { float8::quantise(ctx, from_bf16, Granularity::columnwise, by_column.data(), to); });
  row("bf16 to values in bf16, tensorwise", 4, [&] {
    float8::quantise_to_bf16(ctx, from_bf16, Granularity::tensorwise, by_row.data(), DType::f8e4m3, values);
  });
  row("codes to bf16", 3, [&] { float8::widen(ctx, to, values); });
  row("codes to f32", 5, [&] { float8::widen(ctx, to, view(copy.data(), shape)); });
  const double rate_of_copy = 8 * bytes / copied / 1e9;
  table.insert(table.begin(), {"memcpy f32 (reads and writes)", rate_of_copy});
  std::printf("| %-34s | GB/s   | of copy |\n|---|---|---|\n", "operation");
  for (const auto& [name, rate] : table)
    std::printf("| %-34s | %6.1f | %7.2f |\n", name, rate, rate / rate_of_copy);
  return 0;
}
