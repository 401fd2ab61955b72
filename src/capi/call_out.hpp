// An object of this class exists during each call of a function of the program by the library. So
// weft_callbacks_end knows which are running, and none begins after it. Any thread may use it.
#pragma once

namespace weft::capi {

/// Lives while a function of the program's runs. False: it must not be called, as weft_callbacks_end was.
class CallOut {
 public:
  CallOut() noexcept;
  CallOut(const CallOut&) = delete;
  CallOut& operator=(const CallOut&) = delete;
  ~CallOut();
  explicit operator bool() const noexcept { return entered_; }

 private:
  bool entered_;
};

inline constexpr const char* kEnded =
    "weft no longer calls functions of the program: weft_callbacks_end was called (as the interpreter of "
    "Python ends)";

}  // namespace weft::capi
