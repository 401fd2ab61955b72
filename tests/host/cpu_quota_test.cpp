// The quotas of cgroups, in trees of files like those of the kernel, and the share of several ranks.
#include "host/cores/cpu_quota.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/text/plain_streams.hpp"
#include "host/cores/usable_cores.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"

namespace weft::test::cpu_quota_test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

class CpuQuotas : public testing::Test {
 protected:
  void file(const std::string& path, const std::string& text) const {
    const std::filesystem::path whole = root() + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  std::string root() const { return folder_.path().string(); }
  std::vector<std::int64_t> found() const {
    std::vector<std::int64_t> limits;
    for (const CpuQuota& q : cpu_quotas(root())) limits.push_back(q.millicores);
    return limits;
  }
  void version2(const std::string& cgroup, const std::string& shows = "/") const {
    file("/proc/self/cgroup", "0::" + cgroup + "\n");
    file("/proc/self/mountinfo",
         "22 1 0:20 / /proc rw,relatime shared:5 - proc proc rw\n"
         "30 22 0:26 " +
             shows + " /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
  }

 private:
  const TemporaryFolder folder_;
};

TEST_F(CpuQuotas, OfVersion2AreThoseOfAllCgroupsUpToTheRoot) {
  version2("/batch/job 7/step");
  file("/sys/fs/cgroup/batch/cpu.max", "800000 100000\n");
  file("/sys/fs/cgroup/batch/job 7/cpu.max", "max 100000\n");
  file("/sys/fs/cgroup/batch/job 7/step/cpu.max", "25000 10000\n");
  EXPECT_THAT(found(), ElementsAre(8000, 2500));
  file("/sys/fs/cgroup/batch/cpu.max", "max 100000\n");
  file("/sys/fs/cgroup/batch/job 7/step/cpu.max", "max 100000\n");
  EXPECT_THAT(found(), IsEmpty());
}

// The host's path in a container that sees only its own part of the tree; and the reverse.
TEST_F(CpuQuotas, OfAContainerAreWhereItsPartIsMounted) {
  version2("/docker/abc/inner", "/docker/abc");
  file("/sys/fs/cgroup/cpu.max", "200000 100000\n");
  file("/sys/fs/cgroup/inner/cpu.max", "150000 100000\n");
  EXPECT_THAT(found(), ElementsAre(2000, 1500));
  version2("/docker/other", "/docker/abc");
  EXPECT_THAT(found(), ElementsAre(2000));
  version2("/../elsewhere");
  EXPECT_THAT(found(), ElementsAre(2000));
  version2("/");
  EXPECT_THAT(found(), ElementsAre(2000));
}

TEST_F(CpuQuotas, OfVersion1StandInTheHierarchyOfTheController) {
  file("/proc/self/cgroup",
       "11:memory:/a\n4:cpuset:/elsewhere\n3:cpu,cpuacct:/a/b\n1:name=systemd:/user\n0::/user\n");
  file("/proc/self/mountinfo",
       "30 22 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
       "31 22 0:27 / /sys/fs/my\\040cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
       "32 22 0:28 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n");
  file("/sys/fs/my cpu/cpu.cfs_quota_us", "-1\n");
  file("/sys/fs/my cpu/cpu.cfs_period_us", "100000\n");
  file("/sys/fs/my cpu/a/cpu.cfs_quota_us", "400000\n");
  file("/sys/fs/my cpu/a/cpu.cfs_period_us", "100000\n");
  file("/sys/fs/my cpu/a/b/cpu.cfs_quota_us", "50000\n");
  file("/sys/fs/my cpu/a/b/cpu.cfs_period_us", "100000\n");
  EXPECT_THAT(found(), ElementsAre(4000, 500));
}

TEST_F(CpuQuotas, AreNoneWhereTheSystemSaysNothingOrNonsense) {
  EXPECT_THAT(found(), IsEmpty());
  version2("/a");
  EXPECT_THAT(found(), IsEmpty());
  for (const char* text : {"", "max", "200000", "-5 100000", "200000 0", "2e5 100000", "x y", "0 0"}) {
    file("/sys/fs/cgroup/a/cpu.max", text);
    EXPECT_THAT(found(), IsEmpty()) << text;
  }
  file("/sys/fs/cgroup/a/cpu.max", "1 1000000\n");  // as good as nothing
  EXPECT_THAT(found(), ElementsAre(1));
  file("/proc/self/mountinfo", "30 22 - cgroup2\n - \n\n30 22 0:26 / - cgroup2 cgroup2 rw\n");
  file("/proc/self/cgroup", "0:\n:::::\n\n0::\n");
  static_cast<void>(found());
}

TEST(SharedQuota, IsWhatTheCgroupsOfAllGiveTogether) {
  const CpuQuota pod{1, 4000}, a{2, 2000}, b{3, 1500}, c{4, 3000};
  EXPECT_EQ(shared_millicores({}), 0);
  EXPECT_EQ(shared_millicores({{}, {}}), 0);
  EXPECT_EQ(shared_millicores({{a}, {a}, {a}}), 2000);       // eight ranks of one cgroup have its quota once
  EXPECT_EQ(shared_millicores({{a}, {b}}), 3500);            // containers of their own
  EXPECT_EQ(shared_millicores({{a}, {}}), 0);                // one that nobody limits
  EXPECT_EQ(shared_millicores({{pod, a}, {pod, b}}), 3500);  // within another one's
  EXPECT_EQ(shared_millicores({{pod, a}, {pod, b}, {pod, c}}), 4000);
  EXPECT_EQ(shared_millicores({{pod}, {pod, b}}), 4000);
}

TEST(SharedQuota, Travels) {
  const std::vector<CpuQuota> two{{~std::uint64_t{0}, 2500}, {7, 1}};
  EXPECT_EQ(encode(two), "18446744073709551615:2500,7:1");
  EXPECT_EQ(decode_quotas(encode(two)), two);
  EXPECT_EQ(encode(std::vector<CpuQuota>()), "-");
  for (const char* text : {"-", "", "7", "7:", "7:-1", "7:x", ":", "x:1 ", "-7:1", "7:99999999999999999999",
                           "18446744073709551616:1", "7:1000000001", "7:1,8"})

    EXPECT_TRUE(decode_quotas(text).empty()) << text;
}

// Cgroups that contain each other are invalid, but must not cause an endless loop.
TEST(SharedQuota, OfListsThatContradictEachOtherIsFound) {
  std::string deep = "1:1";
  for (int i = 2; i <= 64; ++i) deep += "," + std::to_string(i) + ":1";
  EXPECT_EQ(decode_quotas(deep).size(), 64u);
  EXPECT_TRUE(decode_quotas(deep + ",65:1").empty());
  std::vector<std::vector<CpuQuota>> processes;
  for (std::uint64_t i = 1; i <= 40; ++i) {  // each in each, and no process in any but 99
    processes.emplace_back();
    for (std::uint64_t k = 0; k < 40; ++k) processes.back().push_back({1 + (i + k * i) % 40, 1000});
    processes.back().push_back({99, 500});
  }
  EXPECT_GT(shared_millicores(processes), 0);
}

TEST(SharedQuota, LimitsTheCoresThatCount) {
  CpuShare ranks = CpuShare::decode("ff/17/5:2500");
  EXPECT_EQ(ranks.count(), 2);
  EXPECT_EQ(CpuShare::decode(ranks.encode()).encode(), ranks.encode());
  ranks |= CpuShare::decode("ff/17/5:2500");  // of the same cgroup
  EXPECT_EQ(ranks.count(), 2);
  ranks |= CpuShare::decode("ff/18/6:9000");  // of another host
  EXPECT_EQ(ranks.count(), 2);
  ranks |= CpuShare::decode("ff/17/6:1500");
  EXPECT_EQ(ranks.count(), 4);
  ranks |= CpuShare::decode("ff/17/-");
  EXPECT_EQ(ranks.count(), 8);
  EXPECT_EQ(CpuShare::decode("1/17/5:64000").count(), 1);
  EXPECT_EQ(CpuShare::decode("ff/17/5:20").count(), 1);
  EXPECT_GE(CpuShare::usable().count(), 1);
  EXPECT_LE(CpuShare::usable().count(), CoreSet::usable().count());
}

// If this program may make a cgroup, in a hierarchy that is mounted and has the controller already.
TEST(RealCgroup, QuotaIsFound) {
  struct Hierarchy {
    std::string at, quota_file, quota;
  };
  std::vector<Hierarchy> hierarchies;
  FileIn mounts("/proc/mounts");
  for (std::string source, at, type, options, rest; mounts >> source >> at >> type >> options;) {
    std::getline(mounts, rest);
    if (type == "cgroup2") hierarchies.push_back({at, "cpu.max", "150000 100000"});
    if (type == "cgroup" && ("," + options + ",").find(",cpu,") != std::string::npos)
      hierarchies.push_back({at, "cpu.cfs_quota_us", "150000"});  // of 100000, the default
  }
  int tried = 0;
  for (const Hierarchy& h : hierarchies) {
    const std::string mine = h.at + "/weft-test-" + std::to_string(::getpid());
    const auto write = [&](const std::string& file, const std::string& text) {
      std::ofstream out(mine + "/" + file);
      return static_cast<bool>(out << text << std::flush);
    };
    if (::mkdir(mine.c_str(), 0755) != 0) continue;
    // Files in cgroup folders cannot be created, so an existing file belongs to the controller.
    if (::access((mine + "/" + h.quota_file).c_str(), W_OK) == 0 && write(h.quota_file, h.quota)) {
      ++tried;
      EXPECT_TRUE(run_in_child([&] {
                    EXPECT_TRUE(write("cgroup.procs", std::to_string(::getpid())));
                    const std::vector<CpuQuota> quotas = cpu_quotas();
                    EXPECT_TRUE(!quotas.empty() && quotas.back().millicores == 1500) << encode(quotas);
                    EXPECT_EQ(usable_cores(), 1);
                    return 0;
                  }).ok())
          << h.at;
    }
    EXPECT_EQ(::rmdir(mine.c_str()), 0) << mine;
  }
  if (tried == 0) GTEST_SKIP() << "no cgroup with a quota can be made here";
}

TEST(RecentQuotas, AreThoseOfTheSystem) {
  EXPECT_EQ(recent_cpu_quotas(), cpu_quotas());
  EXPECT_EQ(recent_cpu_quotas(), cpu_quotas()) << "kept";
}

}  // namespace
}  // namespace weft::test::cpu_quota_test
