#include "backend_names.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "base/text/nearest.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::tools {

std::vector<std::string> backend_names() {
  constexpr std::string_view kPrefix = "libweft_backend_", kSuffix = ".so";
  std::vector<std::string> names = {"auto", "shm"};
  for (const std::string& folder : backend_folders()) {
    std::error_code error;
    for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
         it.increment(error)) {
      const std::string file = it->path().filename().string();
      if (file.size() <= kPrefix.size() + kSuffix.size() || !file.starts_with(kPrefix) ||
          !file.ends_with(kSuffix))
        continue;
      std::string name = file.substr(kPrefix.size(), file.size() - kPrefix.size() - kSuffix.size());
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
    }
  }
  std::sort(names.begin() + 2, names.end());
  return names;
}

std::string unknown_backend(const std::string& name, const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), name) != names.end()) return {};
  const std::string meant = is_meant(name, names);
  return fmt::format("there is no transport \"{}\"{}{} one of {}", name, meant,
                     meant.empty() ? "; expected" : " Expected", fmt::join(names, ", "));
}

}  // namespace weft::tools
