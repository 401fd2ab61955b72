#include "checkpoint/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/errors/caught.hpp"
#include "checkpoint/index/index.hpp"
#include "group/group_state.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// An exception that is no Error gets the code `system`.
struct Words {
  ErrorCode code = ErrorCode::system;
  std::string text;
};

Words words_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return {e.code(), e.what()};
  } catch (...) {
    return {ErrorCode::system, caught_words()};
  }
}

std::string joined(std::string text, std::string_view consequence) {
  if (!text.ends_with(consequence)) text += fmt::format("; {}", consequence);
  return text;
}

bool is_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

[[noreturn]] void throw_first(std::string_view what, int first, ErrorCode code, std::string_view said,
                              const std::string& behind) {
  const std::string head = fmt::format("{}: ", what);
  if (said.starts_with(head)) said.remove_prefix(head.size());
  Failure failure;
  failure.code = code;
  failure.text = fmt::format("{}rank {} failed: {}{}", head, first, said, behind);
  failure.ranks = {first};
  throw Error(std::move(failure));
}

}  // namespace

ProcessGroup* group_of(const DeviceMesh& mesh) { return mesh && mesh.size() > 1 ? &mesh.group() : nullptr; }

std::vector<std::uint64_t> numbers_of_all(ProcessGroup* group, std::uint64_t mine, Duration deadline) {
  if (group == nullptr) return {mine};
  std::vector<std::uint64_t> all(static_cast<std::size_t>(group->size()));
  gather_on_host(*group, view(&mine, 1), view(all), deadline);
  return all;
}

std::vector<std::string> texts_of_all(ProcessGroup* group, std::string_view mine, Duration deadline) {
  mine = mine.substr(0, kMostTextBytes);
  if (group == nullptr) return {std::string(mine)};
  const std::vector<std::uint64_t> sizes = numbers_of_all(group, mine.size(), deadline);
  const std::size_t longest = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::vector<std::uint8_t> own(longest), all(longest * sizes.size());
  std::copy(mine.begin(), mine.end(), own.begin());
  if (longest > 0) gather_on_host(*group, view(own), view(all), deadline);
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < sizes.size(); ++rank)
    texts.emplace_back(reinterpret_cast<const char*>(all.data() + rank * longest),
                       static_cast<std::size_t>(sizes[rank]));
  return texts;
}

void agree(ProcessGroup* group, std::string_view what, std::string_view consequence, std::exception_ptr mine,
           Duration deadline, bool* all_told) {
  if (all_told != nullptr) *all_told = group == nullptr;
  if (group == nullptr) {
    if (mine) std::rethrow_exception(mine);
    return;
  }
  const Words own = mine ? words_of(mine) : Words{};
  ErrorCode code = own.code;
  std::vector<std::string> texts;
  std::size_t first = 0;
  try {
    const std::uint64_t number = mine ? static_cast<std::uint64_t>(own.code) : 0;
    const std::vector<std::uint64_t> codes = numbers_of_all(group, number, deadline);
    if (all_told != nullptr) *all_told = true;
    while (first < codes.size() && codes[first] == 0) ++first;
    if (first == codes.size()) return;
    code = error_code(static_cast<std::int64_t>(codes[first]));
    texts = texts_of_all(group, mine ? joined(own.text, consequence) : "", deadline);
  } catch (...) {  // the first failure is reported
    if (!mine) throw;
  }
  if (mine && (code == own.code || !is_error(mine) || texts.empty())) std::rethrow_exception(mine);
  throw_first(what, static_cast<int>(first), code, texts[first],
              mine ? fmt::format("; on this rank: {}", own.text) : "");
}

void fail_interrupted(ProcessGroup* group, std::string_view what, std::string_view consequence) {
  if (group == nullptr) return;
  detail::Access::state(*group).fail(Failure{
      .code = ErrorCode::aborted,
      .text = fmt::format("{}: rank {} was interrupted while it saved; {}", what, group->rank(), consequence),
      .ranks = {group->rank()}});
}

void agree(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
           std::exception_ptr mine) {
  ProcessGroup* group = nullptr;
  try {
    group = group_of(mesh);
  } catch (...) {  // the first failure is reported
    if (!mine) throw;
  }
  agree(group, what, consequence, std::move(mine));
}

void run_on_all(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
                const std::function<void()>& action) {
  agree(mesh, what, consequence, error_thrown_by(action));
}

std::exception_ptr with_consequence(std::exception_ptr error, std::string_view consequence) {
  if (!error) return error;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    Failure failure{.code = e.code(),
                    .text = joined(e.what(), consequence),
                    .op = e.op(),
                    .call = e.call(),
                    .ranks = {e.ranks().begin(), e.ranks().end()}};
    return std::make_exception_ptr(Error(std::move(failure), e.quiesced()));
  } catch (...) {
    return error;
  }
}

}  // namespace weft
