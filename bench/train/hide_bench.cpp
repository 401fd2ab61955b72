// Measures whether the all-reduce of a parallel layer overlaps with a matrix product of the layer, with one
// thread per rank. The layers are those of the MLP 1024-4096-1024 over all ranks; the reduced tensors are f32
// in shared memory.
//
//   hide_bench --ranks 2 --tokens 8,128,512,2048 --dtype f32,bf16 --seconds 3
//
// The row layer's forward pass is y = x wᵀ, then the sum of y over ranks. `row_alone`: only the product.
// `row_whole`: the product, then the sum. `row_2`, `row_4`, `row_8`: in 2, 4 or 8 blocks of tokens; each
// block is summed while the next is multiplied. The column layer's backward pass is dw = dyᵀ x, dx = dy w,
// and the sum of dx over ranks. `column_alone`: without the sum. `column_after`: dw, dx, the sum.
// `column_first`: dx, the sum, dw. `column_beside`: dx, then the sum at the same time as dw. All times are
// medians; the variants alternate run by run, so that disturbances of the machine affect all of them. The
// sums must have the same bits in f32.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>

#include "harness.hpp"
#include "inputs.hpp"
#include "program.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::bench {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::Stored;

constexpr std::int64_t kDim = 1024, kHidden = 4096;

struct Way {
  std::string name;
  std::function<void()> run;
};

// One rank's matrices. y, dx: (tokens, 1024), in shared memory; all ranks reduce them
class Layers {
 public:
  Layers(RankOfBench& rank, DType dtype, std::int64_t tokens)
      : group_(rank.group),
        compute_(rank.context, 1),
        dtype_(dtype),
        tokens_(tokens),
        mine_(kHidden / rank.spec.ranks) {
    Context& context = rank.context;
    const auto made = [&](const Shape& shape, std::uint32_t stream) {
      const Tensor t = numbers(context, shape, stream, 0.1f, group_.rank() * shape[0] * shape[1]);
      if (dtype_ == DType::f32) return t;
      const Tensor narrow(context, shape, DType::bf16);
      kernels::round_to_bf16(kernels_of(compute_), t.data_ptr<float>(), narrow.data_ptr<bf16>(), t.count());
      return narrow;
    };
    hidden_ = made({tokens, mine_}, kX);
    input_ = made({tokens, kDim}, kDy);
    down_ = made({kDim, mine_}, kWeights);
    up_ = made({mine_, kDim}, kWeights + 1);
    y_ = Tensor(context, {tokens, kDim}, DType::f32, Memory::shared);
    dw_ = Tensor(context, {mine_, kDim});
  }

  std::vector<Way> ways() {
    std::vector<Way> all = {{"row_alone_us", [this] { forward(0, tokens_); }}, {"row_whole_us", [this] {
                                                                                  forward(0, tokens_);
                                                                                  reduce(0, tokens_).wait();
                                                                                }}};
    for (const std::int64_t blocks : {2, 4, 8})
      all.push_back({"row_" + std::to_string(blocks) + "_us", [this, blocks] { forward_by_blocks(blocks); }});
    all.push_back({"column_alone_us", [this] {
                     weight_gradient();
                     input_gradient();
                   }});
    all.push_back({"column_after_us", [this] {
                     weight_gradient();
                     input_gradient();
                     reduce(0, tokens_).wait();
                   }});
    all.push_back({"column_first_us", [this] {
                     input_gradient();
                     reduce(0, tokens_).wait();
                     weight_gradient();
                   }});
    all.push_back({"column_beside_us", [this] {
                     input_gradient();
                     Work sum = reduce(0, tokens_);
                     weight_gradient();
                     sum.wait();
                   }});
    return all;
  }

  std::vector<float> result() const { return {y_.f32().begin(), y_.f32().end()}; }

 private:
  void multiply(const Tensor& a, std::int64_t first, Stored a_stored, const Tensor& b, Stored b_stored,
                float* c, std::int64_t m, std::int64_t n, std::int64_t k) {
    if (dtype_ == DType::f32)
      kernels::matmul(kernels_of(compute_), a.data_ptr<float>() + first, a_stored, b.data_ptr<float>(),
                      b_stored, c, m, n, k, false);
    else
      kernels::matmul(kernels_of(compute_), a.data_ptr<bf16>() + first, a_stored, b.data_ptr<bf16>(),
                      b_stored, c, m, n, k, false);
  }
  void forward(std::int64_t first, std::int64_t tokens) {
    multiply(hidden_, first * mine_, Stored::plain, down_, Stored::transposed,
             y_.data_ptr<float>() + first * kDim, tokens, kDim, mine_);
  }
  void input_gradient() {
    multiply(hidden_, 0, Stored::plain, up_, Stored::plain, y_.data_ptr<float>(), tokens_, kDim, mine_);
  }
  void weight_gradient() {
    multiply(hidden_, 0, Stored::transposed, input_, Stored::plain, dw_.data_ptr<float>(), mine_, kDim,
             tokens_);
  }
  Work reduce(std::int64_t first, std::int64_t tokens) {
    const Tensor part = y_.slice_flat(first * kDim, {tokens, kDim});
    return group_.all_reduce(Buffer{part.data_ptr<float>(), part.count(), DType::f32});
  }
  void forward_by_blocks(std::int64_t blocks) {
    std::vector<Work> sums;
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t first = tokens_ * b / blocks, tokens = tokens_ * (b + 1) / blocks - first;
      forward(first, tokens);
      sums.push_back(reduce(first, tokens));
    }
    for (Work& sum : sums) sum.wait();
  }

  ProcessGroup& group_;
  Compute compute_;
  DType dtype_;
  std::int64_t tokens_, mine_;
  Tensor hidden_, input_, down_, up_, y_, dw_;
};

// Throws if two variants give different bits for one sum.
void check(Layers& layers, const std::vector<Way>& ways, DType dtype) {
  std::vector<float> row, column;
  for (const Way& way : ways) {
    way.run();
    const std::vector<float> got = layers.result();
    std::vector<float>& want = way.name.starts_with("row") ? row : column;
    const bool alone = way.name.find("alone") != std::string::npos;
    if (alone || dtype != DType::f32) continue;
    if (want.empty()) want = got;
    if (std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) != 0)
      throw Error(ErrorCode::system, way.name + ": other bits than the way before it");
  }
}

Numbers measured(RankOfBench& rank, DType dtype, std::int64_t tokens, const Agree& agree, double seconds) {
  Layers layers(rank, dtype, tokens);
  const std::vector<Way> ways = layers.ways();
  check(layers, ways, dtype);
  std::vector<std::vector<double>> us(ways.size());
  const auto begin = Clock::now();
  do {
    for (std::size_t k = 0; k < ways.size(); ++k) {
      ways[k].run();  // leaves the caches in the state after a run of this variant
      rank.group.barrier().wait();
      const auto start = Clock::now();
      ways[k].run();
      rank.group.barrier().wait();  // all ranks end with the slowest rank
      us[k].push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    }
  } while (agree(std::chrono::duration<double>(Clock::now() - begin).count() < seconds || us[0].size() < 5) !=
           0);
  Numbers all;
  for (std::size_t k = 0; k < ways.size(); ++k) all.emplace_back(ways[k].name, times_of(us[k]).median_us);
  all.emplace_back("samples", static_cast<double>(us[0].size()));
  return all;
}

std::vector<TableRow> table(RankOfBench& rank, const std::vector<std::int64_t>& all_tokens) {
  std::vector<TableRow> rows;
  for (const DType dtype : rank.spec.dtypes)
    for (const std::int64_t tokens : all_tokens) {
      TableRow row;
      row.name = "hide/" + std::string(name(dtype)) + "/" + std::to_string(tokens);
      row.row = {{{"op", "hide"}, {"case", row.name}}, rank.spec.ranks, 0, {}};
      row.measure = [&rank, dtype, tokens](const Agree& agree, double seconds) {
        return measured(rank, dtype, tokens, agree, seconds);
      };
      rows.push_back(std::move(row));
    }
  return rows;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  std::vector<std::int64_t> tokens = {512};
  return program_main(
      argc, argv, {tokens_flag(tokens)}, [&](RankOfBench& rank) { return table(rank, tokens); },
      [](const Spec& spec) { return settings_of(spec) + ", one thread a rank"; });
}
