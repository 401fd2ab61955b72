// All of libweft that programs use: base to dp. Not in it: weft/base/env.hpp, clock.hpp and the like, which these
// include where they need them; what transports are built from (weft/backends/, beside backend.hpp); and what
// libweft_train adds (weft/nn, tp, train, models, checkpoint), which is included header by header.
#pragma once

#include "weft/backends/backend.hpp"
#include "weft/base/buffer.hpp"
#include "weft/base/chunk.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/base/tensor.hpp"
#include "weft/base/view.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/dp/sampler.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/context.hpp"
#include "weft/host/pin.hpp"
#include "weft/mesh/boundary.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/store/file.hpp"
#include "weft/store/store.hpp"
#include "weft/store/tcp.hpp"
