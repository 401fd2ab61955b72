// The recorder in C. Any thread may call it.
#include "capi/handles.hpp"

namespace capi = weft::capi;

weft_status weft_group_trace_json(const weft_group* group, weft_text** json, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_group& g = capi::given(function, group, "group");
    weft_text*& to = capi::given(function, json, "json");
    to = new weft_text{g.handle->group.trace_json()};
  });
}

weft_status weft_group_trace_chrome(const weft_group* group, weft_text** json, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_group& g = capi::given(function, group, "group");
    weft_text*& to = capi::given(function, json, "json");
    to = new weft_text{g.handle->group.trace_chrome()};
  });
}
