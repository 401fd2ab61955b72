#include "weft/nn/packed_documents.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"

namespace weft {

std::shared_ptr<const PackedDocuments> PackedDocuments::of(Context& context, const Tensor& ids,
                                                           const char* what) {
  if (ids.dtype() != DType::i64 || ids.shape().rank() != 2)
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {} {}; expected i64 (rows, sequence)", what,
                                                     name(ids.dtype()), to_string(ids.shape())));
  const Tensor here = to_host(context, ids);
  const auto* const id = here.data_ptr<std::int64_t>();
  std::shared_ptr<PackedDocuments> documents(new PackedDocuments(ids.size(0), ids.size(1)));
  for (std::int64_t row = 0; row < documents->rows_; ++row) {
    const std::int64_t begin = row * documents->sequence_, end = begin + documents->sequence_;
    for (std::int64_t first = begin, at = begin + 1; at <= end; ++at)
      if (at == end || id[at] != id[first]) {
        documents->add(first, at - first);
        first = at;
      }
  }
  return documents;
}

void PackedDocuments::add(std::int64_t first, std::int64_t length) {
  if (!runs_.empty() && runs_.back().length == length)
    ++runs_.back().count;
  else
    runs_.push_back({first, 1, length});
}

}  // namespace weft
