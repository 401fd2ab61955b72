// Every public header of C++ includes this one, most of them through others: a compiler that is told an older standard says this first
// instead of what it does not understand further down.
#pragma once

#if __cplusplus < 202002L
#error "weft needs C++20: compile with -std=c++20 (CMake: target_link_libraries(... weft::weft) sets it)"
#endif
