// For tests of the group's own work: a group "x" over the recording backend, with one rank in this process.
// The recording backend only pretends that there are other ranks.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "support/recording_backend.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/store/store.hpp"

namespace weft::test {

class RecordedGroup : public testing::Test {
 protected:
  Membership membership(int size = 3, int rank = 0) {
    Membership m;
    m.store = store;
    m.rank = rank;
    m.size = size;
    m.name = "x";
    m.deadline = std::chrono::seconds(10);
    return m;
  }
  ProcessGroup make(int size = 3, int rank = 0) {
    return ProcessGroup::create(context, recording.factory(), membership(size, rank));
  }

  Context context;
  std::shared_ptr<Store> store = make_local_store();
  Recording recording;
  std::vector<float> a = std::vector<float>(12, 1.f), b = std::vector<float>(12, 2.f);
};

}  // namespace weft::test
