// Every public C++ header includes this header, directly or through another one. If the compiler runs with an
// older standard, it reports this error first, before errors about code that it does not understand.
#pragma once

#if __cplusplus < 202002L
#error "weft needs C++20: compile with -std=c++20 (CMake: target_link_libraries(... weft::weft) sets it)"
#endif
