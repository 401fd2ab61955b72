// The common part of the functions for stores and groups of weft.h.
#pragma once

#include <cstdint>
#include <string>

#include "capi/handles.hpp"

namespace weft::capi {

/// A duration of at least zero. Zero means `otherwise`.
Duration limit_or(const char* function, std::int64_t ns, const char* what, Duration otherwise);
/// `least` to 65535.
std::uint16_t port_of(const char* function, std::int32_t port, const char* what, int least);
/// 64 hexadecimal digits. Throws system.
std::string random_secret(const char* function);

/// With the defaults in the place of nulls and zeros, except process_rank.
weft_group_options group_options(const char* function, const weft_group_options* options);
/// The members of rank `rank` of `size`, with the values of the options. Throws bad_argument as
/// ProcessGroup::create() does. `process_rank`: the value if the options have none.
Membership membership(int rank, int size, int process_rank, const weft_group_options& options);
weft_group* new_group(const std::shared_ptr<ContextState>& context, ProcessGroup group);

}  // namespace weft::capi
