// The matrix registers of AMX in plain code, so that the products of matrix_tiles.hpp run where there is no
// AMX.
#pragma once

#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::test {

/// The products of MatrixTiles with emulated registers; null if the CPU has no AVX-512.
const gemm::Kernel* emulated_matrix_tiles() noexcept;

}  // namespace weft::kernels::test
