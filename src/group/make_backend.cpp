#include "group/make_backend.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <new>
#include <system_error>

#include "backends/compose/compose.hpp"
#include "backends/compose/op_support.hpp"
#include "base/errors/caught.hpp"
#include "base/memfd.hpp"
#include "base/waits/suspension.hpp"
#include "host/progress_engine.hpp"
#include "weft/backends/join.hpp"

namespace weft {
namespace {

// May be called only in a catch block. Returns the text of a library's exception. Adds a note if this process
// can open no more files, because the library may have reached this limit without reporting it.
std::string words_of_library() {
  std::string words = with_limits(caught_words());
  const Descriptor one(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!one && errno == EMFILE && words.find("ulimit -n") == std::string::npos)
    words += ": " + system_words(EMFILE);
  return words;
}

// Converts any exception of a transport's library into an Error whose text is the system's ("no memory", "no
// threads") or the exception's own.
std::unique_ptr<Backend> call_factory(const BackendFactory& factory, const GroupInit& b) {
  const auto failed = [&](const std::string& why) {
    return Error(ErrorCode::system, fmt::format("group \"{}\": {} [rank {}]", b.name, why, b.rank));
  };
  try {
    // The factory waits for ranks in many places. Meanwhile peers in this rank's other groups may send
    // roll-calls, so the waits answer them.
    ProgressEngine& progress = progress_of(b.context, b.process_rank);
    const CalledInWaits answers([&progress] { progress.answer(); });
    return factory(b);
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw failed(system_words(ENOMEM));
  } catch (const std::system_error& e) {
    throw failed(e.code().category() == std::generic_category() ||
                         e.code().category() == std::system_category()
                     ? system_words(e.code().value())
                     : e.what());
  } catch (...) {
    throw failed(words_of_library());
  }
}

}  // namespace

std::unique_ptr<Backend> make_backend(const BackendFactory& factory, const GroupInit& init) {
  std::unique_ptr<Backend> made;
  try {
    // An Interrupt that was raised before counts even if this call would not wait, because the other ranks
    // have arrived.
    if (Deadline::after(std::chrono::hours(1)).passed())
      throw Error(ErrorCode::timeout, fmt::format("group \"{}\": interrupted", init.name));
    made = call_factory(factory, init);
    if (made == nullptr)
      throw Error(
          ErrorCode::unsupported,
          fmt::format("group \"{}\": the transport's factory (a plug-in's `make`) returned null [rank {}]",
                      init.name, init.rank));
  } catch (const Error& e) {
    throw give_up(init, e);
  }
  return needs_composition(made->traits()) ? compose(init.context, std::move(made), init.rank, init.size)
                                           : std::move(made);
}

}  // namespace weft
