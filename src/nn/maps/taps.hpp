// Tables of taps: how maps are padded, averaged and resized along one dimension. Pure functions. Included
// only inside nn and domain.
#pragma once

#include <cstdint>

#include "weft/nn/kernels.hpp"

namespace weft::taps {

/// Adds `before` and `after` elements to the n existing ones, as the padding says. Elements of a zero padding
/// have no taps. The caller must have checked that there are enough elements.
kernels::Taps padded(std::int64_t n, std::int64_t before, std::int64_t after, kernels::Padding padding);
/// Means of `kernel` elements, `stride` apart. Elements beyond the border are 0; they count if
/// `count_padding` is set.
kernels::Taps averaged(std::int64_t n, std::int64_t kernel, std::int64_t stride, std::int64_t padding,
                       bool count_padding);
/// `out` means of parts [r n / out, (r + 1) n / out), each of complete elements.
kernels::Taps averaged_to(std::int64_t n, std::int64_t out);
/// Output r is element floor(r n / out).
kernels::Taps nearest(std::int64_t n, std::int64_t out);
/// Output r lies between the two elements about (r + 1/2) n / out - 1/2, or r (n - 1) / (out - 1) with
/// aligned corners.
kernels::Taps linear(std::int64_t n, std::int64_t out, bool align_corners);

/// The adjoint. Input i becomes an output, whose taps are the outputs that used it, in their order. n: the
/// number of inputs.
kernels::Taps transposed(const kernels::Taps& of, std::int64_t n);

}  // namespace weft::taps
