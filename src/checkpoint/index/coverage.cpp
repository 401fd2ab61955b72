// Checks that the parts cover each element exactly once.
//
// For each element, the count is the number of parts that contain it, less 1. It must be 0 for all elements.
// The count is a sum of boxes, each part with the sign + and the whole tensor with the sign -. Along the
// first dimension the sum changes only at coordinates at which a box begins or ends, and it is 0 everywhere
// if and only if each of these changes is 0. A change is again a sum of signed boxes, in one dimension less:
// boxes that begin there, and with the opposite sign boxes that end there. If no dimension is left, the
// change is a number. The first change that is not 0 is at the first element whose count is not 0.
#include "checkpoint/index/coverage.hpp"

#include <algorithm>
#include <vector>

namespace weft {
namespace {

struct SignedBox {
  const Box* box;
  int sign;
};

struct Change {
  std::int64_t at;
  SignedBox box;
};

// Returns the count at the first element from `dim` on whose count is not 0. `element` receives that element.
std::int64_t first_count(int dim, const std::vector<SignedBox>& boxes, Dims& element) {
  if (dim == element.rank()) {
    std::int64_t sum = 0;
    for (const SignedBox& b : boxes) sum += b.sign;
    return sum;
  }
  std::vector<Change> changes;
  changes.reserve(2 * boxes.size());
  for (const SignedBox& b : boxes) {
    changes.push_back({b.box->offset[dim], b});
    changes.push_back({b.box->offset[dim] + b.box->shape[dim], {b.box, -b.sign}});
  }
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.at < b.at; });
  std::vector<SignedBox> here;
  for (auto next = changes.begin(); next != changes.end();) {
    const std::int64_t at = next->at;
    here.clear();
    for (; next != changes.end() && next->at == at; ++next) here.push_back(next->box);
    // The sum of all changes is 0. So if all other changes are 0, the last one is 0, too.
    if (next == changes.end()) break;
    element[dim] = at;
    if (const std::int64_t count = first_count(dim + 1, here, element); count != 0) return count;
  }
  return 0;
}

}  // namespace

std::optional<NotCovered> first_not_covered_once(const Shape& whole, std::span<const CheckpointPart> parts) {
  const Box all = whole_box(whole);
  std::vector<SignedBox> boxes;
  if (all.shape.count() > 0) boxes.push_back({&all, -1});
  for (const CheckpointPart& part : parts)
    if (part.box.shape.count() > 0) boxes.push_back({&part.box, 1});
  NotCovered wrong{.element = all.offset};
  const std::int64_t count = first_count(0, boxes, wrong.element);
  if (count == 0) return std::nullopt;
  wrong.parts = count + 1;
  return wrong;
}

}  // namespace weft
