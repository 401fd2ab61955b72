// Every public header of C++ includes this one, most of them through others. If a compiler runs with an
// older standard, this error comes first, before the errors of code that it does not understand.
#pragma once

#if __cplusplus < 202002L
#error "weft needs C++20: compile with -std=c++20 (CMake: target_link_libraries(... weft::weft) sets it)"
#endif
