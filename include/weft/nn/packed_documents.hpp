// Documents that are packed into sequences: attention stays inside each of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// How the sequences of a batch are cut into documents, without gaps. A token attends to the tokens of its
/// own document up to itself, and the positions of each document begin at 0: a document has the outputs that
/// it has as a sequence of its own. (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.2, masks in
/// this way; the field calls the mask block-causal, and the numbers of documents segment ids.) Immutable; any
/// thread.
class PackedDocuments {
 public:
  /// Documents of equal length that follow each other, also over the end of a row.
  struct Run {
    std::int64_t first;   ///< the place of their first token among the tokens of all rows
    std::int64_t count;   ///< of documents
    std::int64_t length;  ///< of each
  };

  /// ids: i64 (rows, sequence), on any device. Successive tokens of a row that have the same number are a
  /// document; a number that comes again later is another document. Throws bad_argument, with `what` as the
  /// name of the tensor, if it has another dtype or number of dimensions.
  static std::shared_ptr<const PackedDocuments> of(Context& context, const Tensor& ids, const char* what);

  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t sequence() const noexcept { return sequence_; }
  const std::vector<Run>& runs() const noexcept { return runs_; }

 private:
  PackedDocuments(std::int64_t rows, std::int64_t sequence) : rows_(rows), sequence_(sequence) {}
  void add(std::int64_t first, std::int64_t length);
  std::int64_t rows_, sequence_;
  std::vector<Run> runs_;
};

}  // namespace weft
