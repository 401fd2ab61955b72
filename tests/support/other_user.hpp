// Another user, for tests that run as root.
#pragma once

#include <grp.h>
#include <unistd.h>

namespace weft::test {

inline constexpr uid_t kNobody = 65534;

/// Makes this process belong to that user from now on. Returns false if that is not allowed.
inline bool become_user(uid_t user) {
  return ::setgroups(0, nullptr) == 0 && ::setresgid(user, user, user) == 0 &&
         ::setresuid(user, user, user) == 0;
}

}  // namespace weft::test
