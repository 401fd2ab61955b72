// The parts of a pass of Attention that know nothing of each other. Only files of nn include it.
#pragma once

#include <fmt/format.h>

#include "base/mutant.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/packed_documents.hpp"

namespace weft {

/// Where a part begins in each of the tensors of a pass: numbers of elements.
struct PartOfAttention {
  std::int64_t q = 0;        ///< also out, and their gradients
  std::int64_t kv = 0;       ///< k and v, and their gradients
  std::int64_t softmax = 0;  ///< of a part: (samples, heads, queries, kSoftmaxTerms)
};

/// Calls work(part, shape) for all tokens at once, or, if the pass has documents, for each run of documents
/// of equal length, which are samples of that part. So no score between two documents is ever computed.
/// Throws bad_argument if the documents are of another batch.
template <class Work>
void each_part(const Frame& frame, const std::string& path, const kernels::AttentionShape& s,
               const Work& work) {
  const PackedDocuments* const documents = frame.documents().get();
  if (documents == nullptr || WEFT_MUTANT("document_borders_ignored")) return work(PartOfAttention{}, s);
  if (documents->rows() != s.batch || documents->sequence() != s.seq)
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\": the pass has documents of ({}, {}) tokens; expected ({}, {}), as x",
                            path, documents->rows(), documents->sequence(), s.batch, s.seq));
  for (const PackedDocuments::Run& run : documents->runs()) {
    kernels::AttentionShape of = s;
    of.batch = run.count;
    of.seq = run.length;
    work(PartOfAttention{run.first * s.heads * s.head_dim, run.first * s.kv_heads * s.head_dim,
                         run.first * s.heads * kernels::kSoftmaxTerms},
         of);
  }
}

}  // namespace weft
