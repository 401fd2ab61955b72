// For each device, each layer has a table of function pointers. This file has the place of these tables. The
// code that adds the device provides the tables.
#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "weft/base/device.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// The tables of one kind in a Context: `context.attached<DeviceTables<KernelTable>>()`. The tables must
/// outlive the Context. Thread-safe.
template <class Table>
class DeviceTables {
 public:
  explicit DeviceTables(Context&) {}
  /// Returns false, and changes nothing, if the device has a table already.
  bool add(Device device, const Table& table) {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, its] : tables_)
      if (known == device) return false;
    tables_.emplace_back(device, &table);
    return true;
  }
  /// Null if no table was added.
  const Table* find(Device device) {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, table] : tables_)
      if (known == device) return table;
    return nullptr;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<Device, const Table*>> tables_;
};

}  // namespace weft
