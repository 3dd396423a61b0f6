// What a forked child keeps of the parent: no descriptor, no mapping, and no way to use its
// objects.
#include "base/fork.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/file_descriptor.hpp"

namespace r2ccl {
namespace {

FileDescriptor make_event() {
  return FileDescriptor::made_by([] { return ::eventfd(0, EFD_CLOEXEC); });
}

// Returns the exit status of a child that runs `body`; -1 after 60 s.
int status_of_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  for (int tries = 0; tries < 60000; ++tries) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child)
      return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return -1;
}

bool open_here(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// Counts the open event descriptors without an allocation: the child of a process with threads may
// not allocate.
int events_open() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) {
    char path[32] = "/proc/self/fd/";
    char* end = path + sizeof("/proc/self/fd/") - 1;
    if (fd >= 100) *end++ = static_cast<char>('0' + fd / 100);
    if (fd >= 10) *end++ = static_cast<char>('0' + fd / 10 % 10);
    *end++ = static_cast<char>('0' + fd % 10);
    *end = '\0';
    char target[64] = {};
    if (::readlink(path, target, sizeof(target) - 1) > 0 &&
        std::string_view(target).find("eventfd") != std::string_view::npos)
      ++count;
  }
  return count;
}

TEST(Fork, AChildClosesTheDescriptorsOfTheParent) {
  const FileDescriptor kept = make_event();
  FileDescriptor first = make_event();
  FileDescriptor moved = std::move(first);
  const int closed = moved.get();
  moved.reset();
  const int other = ::eventfd(0, EFD_CLOEXEC);  // not of the core
  EXPECT_EQ(other, closed);
  EXPECT_EQ(status_of_child([&] {
              if (open_here(kept.get()) || kept.valid()) return 1;
              return open_here(other) ? 0 : 2;
            }),
            0);
  EXPECT_TRUE(open_here(kept.get()));
  ::close(other);
}

TEST(Fork, AnOldObjectClosesNoDescriptorOfTheChild) {
  std::optional<FileDescriptor> old(make_event());
  const int number = old->get();
  EXPECT_EQ(status_of_child([&] {
              if (::eventfd(0, 0) != number) return 1;
              old.reset();
              return open_here(number) ? 0 : 2;
            }),
            0);
}

TEST(Fork, AChildClosesItsOwnDescriptors) {
  EXPECT_EQ(status_of_child([] {
              FileDescriptor made = make_event();
              const int number = made.get();
              made.reset();
              return open_here(number) ? 1 : 0;
            }),
            0);
}

TEST(Fork, AMappingIsAbsentInAChild) {
  constexpr std::size_t bytes = 4096;
  std::optional<Mapping> mapping(
      std::in_place,
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), bytes);
  void* const address = mapping->get();
  EXPECT_EQ(status_of_child([&] {
              unsigned char resident = 0;
              if (::mincore(address, bytes, &resident) == 0) return 1;
              // The child may use the addresses for other memory, which an old object leaves alone.
              if (::mmap(address, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                         0) != address)
                return 2;
              mapping.reset();
              return ::mincore(address, bytes, &resident) == 0 ? 0 : 3;
            }),
            0);
}

TEST(Fork, ALockOfAMappedFileEndsWithTheParent) {
  const std::string path = ::testing::TempDir() + "/fork_test." + std::to_string(::getpid());
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    FileDescriptor file = FileDescriptor::made_by(
        [&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600); });
    if (::ftruncate(file.get(), 4096) != 0 || ::flock(file.get(), LOCK_EX) != 0) ::_exit(1);
    const Mapping mapping(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0),
                          4096);
    if (::fork() == 0) {  // outlives its parent
      const pid_t self = ::getpid();
      (void)!::write(ready[1], &self, sizeof(self));
      ::sleep(120);
      ::_exit(0);
    }
    ::sleep(120);
    ::_exit(0);
  }
  pid_t child = 0;
  ASSERT_EQ(::read(ready[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  const FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_NE(::flock(file.get(), LOCK_EX | LOCK_NB), 0);
  ::kill(parent, SIGKILL);
  ::waitpid(parent, nullptr, 0);
  EXPECT_EQ(::flock(file.get(), LOCK_EX | LOCK_NB), 0);
  ::kill(child, SIGKILL);
  ::unlink(path.c_str());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(Fork, AnObjectKnowsItsProcess) {
  const Origin origin;
  EXPECT_TRUE(origin.check("engine").ok());
  EXPECT_EQ(status_of_child([&] {
              const Origin own;
              if (!origin.foreign() || own.foreign()) return 1;
              return origin.check("engine").code() == ErrorCode::invalid_argument ? 0 : 2;
            }),
            0);
}

// Other threads open and close descriptors: a child inherits none of them, and closes no other.
TEST(Fork, ForksAmidOpeningAndClosingKeepNothing) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer allows no fork amid threads";
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
  GTEST_SKIP() << "ThreadSanitizer allows no fork amid threads";
#endif
#endif
  const int foreign = ::eventfd(0, EFD_CLOEXEC);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&stop] {
      while (!stop) {
        FileDescriptor made = make_event();
        FileDescriptor moved = std::move(made);
        moved.reset();
      }
    });
  for (int i = 0; i < 500; ++i) {
    const int status = status_of_child([&] { return open_here(foreign) ? events_open() : 200; });
    if (status == 1) continue;
    ADD_FAILURE() << "fork " << i << ": status " << status << "; right: 1, the foreign descriptor";
    break;
  }
  stop = true;
  for (std::thread& each : threads) each.join();
  ::close(foreign);
}

}  // namespace
}  // namespace r2ccl
