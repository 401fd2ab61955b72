// The headers for programs that only communicate: Context, Store, ProcessGroup, Tensor, and the types in
// their signatures. They take less time to compile than weft/weft.hpp.
#pragma once

#include "weft/base/error.hpp"
#include "weft/base/tensor.hpp"
#include "weft/base/view.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/store/store.hpp"
