// The base of all handles of weft.h and weft_train.h. Each handle that is alive is in a table, by its
// address. weft looks up an argument in this table before it reads the argument's memory. So a handle that is
// destroyed, or which another libweft of the process made, is an error and no crash. The kind is compared,
// too. Any thread may use it.
//
// It cannot detect two mistakes. First, an old address at which there is now a new handle of the same kind
// counts as the new handle. Second, a handle must not be destroyed while another thread's call uses it.
#pragma once

#include <type_traits>

namespace weft::capi {

class HandleBase;
/// Takes the handle out of the table, once, so that it may be deleted. Returns false, and writes a line to
/// stderr, if there is no such handle or it is borrowed.
bool retire(const char* function, HandleBase* handle, const char* what, const char* kind) noexcept;

/// In the table from its constructor until retire() or its destructor.
class HandleBase {
 public:
  const char* kind() const noexcept { return kind_; }
  /// From now on the handle belongs to another handle, from which the program borrows it. retire() does not
  /// destroy it.
  void lend() noexcept { lent_ = true; }

 protected:
  /// Throws std::bad_alloc.
  explicit HandleBase(const char* kind);
  HandleBase(const HandleBase& other) : HandleBase(other.kind_) {}
  HandleBase& operator=(const HandleBase&) noexcept { return *this; }
  ~HandleBase();

 private:
  friend bool retire(const char*, HandleBase*, const char*, const char*) noexcept;
  const char* kind_;  // null: retired
  bool lent_ = false;
};

/// The first base of a handle: `struct weft_group : Handle<weft_group>`, which has
/// `static constexpr const char* kKind`, its name in C. This base is the first base, and the handle has no
/// virtual functions, so that both have one address.
template <class T>
class Handle : public HandleBase {
 protected:
  Handle() : HandleBase(T::kKind) {}
};

/// Whether a handle that is alive has this address. Reads no memory of it.
bool is_alive(const void* handle) noexcept;
/// Whether that is so, and the handle is of this kind.
bool is_alive(const HandleBase* handle, const char* kind) noexcept;
/// Throws bad_argument unless is_alive(). `what` is the argument's name in texts.
void expect_alive(const char* function, const HandleBase* handle, const char* what, const char* kind);

/// The whole of a function that destroys a handle. It does nothing to an address that is no live handle.
template <class T>
void destroy(const char* function, T* handle, const char* what) noexcept {
  static_assert(!std::is_polymorphic_v<T>);
  if (handle != nullptr && retire(function, handle, what, T::kKind)) delete handle;
}

}  // namespace weft::capi
