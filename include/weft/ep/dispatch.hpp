// The way of tokens to their experts and back. Functions on any memory of the host; they know no modules. One
// thread per rank.
//
// In a layer the ranks of a group hold different experts and different tokens:
//
//   route_tokens → gather_choices → TokenRoutes → dispatch → experts → combine → weighted_sum
//
// Every rank makes the same calls of the group, whatever is routed: a rank that has no token, sends none or
// gets none makes them, too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/base/view.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/transfer.hpp"

namespace weft {

/// The choices of all ranks of a group, in the order of the ranks.
struct ExpertChoices {
  Tensor experts;                    ///< i32, (all choices); ~e is a dropped choice of expert e
  Tensor weights;                    ///< f32, (all choices)
  std::vector<std::int64_t> tokens;  ///< of each rank
};

/// Gives every rank the choices of all ranks. experts: i32 (tokens, top_k); weights: f32, alike. Collective:
/// two all-gathers, the first of two numbers per rank. Ranks may have any numbers of tokens. Throws mismatch
/// on all ranks if ranks differ in top_k.
ExpertChoices gather_choices(Compute& compute, ProcessGroup& group, const ConstTensorView& experts,
                             const ConstTensorView& weights);
/// The same if the number of tokens of each rank is known: one all-gather.
ExpertChoices gather_choices(Compute& compute, ProcessGroup& group, const ConstTensorView& experts,
                             const ConstTensorView& weights, std::vector<std::int64_t> tokens);

/// The choices of one rank alone.
ExpertChoices own_choices(Compute& compute, const ConstTensorView& experts, const ConstTensorView& weights);

/// Where the rows of one rank's tokens travel, and where they come back. Made from the choices of all ranks
/// without communication; immutable. A token is sent once to each rank that holds at least one of its
/// experts; dropped choices do not travel.
///
/// A rank has its rows in a fixed order: by expert, then by the rank, token and number of the choice. With
/// one rank that is the order of a serial layer, so results do not depend on the number of ranks.
class TokenRoutes {
 public:
  /// `first_experts`: rank r holds the experts first_experts[r] to first_experts[r + 1]; one number more than
  /// there are ranks. Throws bad_argument, naming the choice, if an expert does not exist, or if a token
  /// chose an expert twice.
  TokenRoutes(const ExpertChoices& choices, int rank, int top_k, std::span<const std::int64_t> first_experts);

  std::int64_t tokens() const noexcept { return tokens_; }  ///< of this rank
  std::int64_t rows() const noexcept { return offsets_.back(); }
  /// Choices of this rank's tokens that were not dropped: rows of a combine's result.
  std::int64_t results() const noexcept { return first_results_.back(); }
  /// The rows of expert i of this rank are offsets()[i] to offsets()[i + 1].
  std::span<const std::int64_t> offsets() const noexcept { return offsets_; }
  /// The weight with which each row's result is used.
  std::span<const float> row_weights() const noexcept { return row_weights_; }
  /// The token of each row: its number among the tokens of all ranks, in the order of the ranks.
  std::span<const std::int64_t> row_tokens() const noexcept { return row_tokens_; }
  /// Rows that this rank sends to other ranks and receives from them, of one dispatch.
  std::int64_t sent_rows() const noexcept { return rows_in(sent_tokens_); }
  std::int64_t received_rows() const noexcept { return rows_in(came_rows_); }

  /// Begins to send x: (tokens, width) to the experts. The result is (rows, width): one row for each choice
  /// of an expert of this rank. Any dtype. `group` has the ranks of the choices; null if there is one. Nobody
  /// may write x before finish(), and this TokenRoutes must exist until then.
  ///
  /// Collective: one exchange (ExchangePlan) with all ranks of the group. If x is in Memory::shared, a rank
  /// of the same host reads the rows at their places in x, and writes them to their places in the result.
  /// Otherwise the transport packs the rows that travel. Throws mismatch that names the ranks if two of them
  /// count the rows between them differently.
  Transfer start_dispatch(Compute& compute, ProcessGroup* group, const Tensor& x) const;
  /// Begins to send rows: (rows, width) back, like start_dispatch(). The result is (choices that were not
  /// dropped, width), in an order of its own, which weighted_sum() and row_products() know.
  Transfer start_combine(Compute& compute, ProcessGroup* group, const Tensor& rows) const;
  /// The same on the caller's memory, which must live until finish(). rows: (rows(), width) and results:
  /// (results(), width), of the dtype of x.
  Transfer start_dispatch(ProcessGroup* group, const ConstTensorView& x, const TensorView& rows) const;
  Transfer start_combine(ProcessGroup* group, const ConstTensorView& rows, const TensorView& results) const;

  /// y = the sum of weight · result over the choices of each token, in the order of the choices, in f32.
  /// results: of start_combine(), f32 or bf16; weights: f32 (tokens, top_k), or empty: 1 each; y: (tokens,
  /// width), of the dtype of results. A token without choices gets 0.
  void weighted_sum(const ConstTensorView& results, const ConstTensorView& weights,
                    const TensorView& y) const;
  /// dweights = the product of dy: (tokens, width) with the result of each choice, in f32; 0 for a dropped
  /// choice. dweights: f32 (tokens, top_k).
  void row_products(const ConstTensorView& results, const ConstTensorView& dy,
                    const TensorView& dweights) const;

 private:
  using RowsByRank = std::vector<std::vector<std::int64_t>>;
  static std::int64_t rows_in(const RowsByRank& lists) noexcept {
    std::size_t count = 0;
    for (const auto& list : lists) count += list.size();
    return static_cast<std::int64_t>(count);
  }
  Work exchanged(ProcessGroup* group, const ExchangePlan& plan, const ConstTensorView& in,
                 const TensorView& out) const;
  std::int64_t tokens_;
  int top_k_, ranks_, rank_;
  std::vector<std::int64_t> offsets_;     // by expert of this rank
  std::vector<std::int64_t> row_tokens_;  // by row
  std::vector<float> row_weights_;        // by row
  // For each rank of the group: the rows here whose results go there, by token and choice. For each other
  // rank: the tokens of this rank to send there, and the row here of each token that comes from there.
  RowsByRank returned_rows_, sent_tokens_, came_rows_;
  std::vector<std::int64_t> own_tokens_;  // of each row in returned_rows_ of this rank itself
  // Rows of tokens of other ranks with several experts here: which of them is a copy of which.
  std::vector<std::int64_t> copied_from_, copied_to_;
  std::vector<std::int64_t> first_results_;  // the results from each rank begin there; the number of all
  std::vector<std::int64_t> result_of_;      // by choice of this rank: which row of the results; -1: dropped
};

/// The rows of x, (rows, width) in f32 or bf16, as bytes that travel in a dispatch: (rows, width + 4) of u8.
/// A row is the codes of f8e4m3 of its elements times the row's scale, then this scale, a power of two
/// (float8::scale_of()).
Tensor to_float8_rows(Compute& compute, const Tensor& x, Memory memory = Memory::local);
/// The values of such rows: code / scale, in f32 or bf16, which hold each of them exactly.
Tensor from_float8_rows(Compute& compute, const Tensor& rows, DType dtype);

}  // namespace weft
