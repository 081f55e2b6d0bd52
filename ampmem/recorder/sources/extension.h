// What the files of the extension share: one mutex, the clock, and what runs on the calling thread.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace ampmem {

// The node around an event: the index of its name, and the number of the innermost node that has one.
struct Around {
  int64_t name, number;
};

extern std::mutex mutex;  // of the tables of all files; torch is never called while it is held

// Called with the mutex held, for a CUDA block that is allocated (bytes > 0) or freed (< 0): whether it was taken.
extern bool (*cuda_report)(int64_t address, int64_t bytes);

// The clock of Python's time.time_ns.
int64_t now_ns();

// With the mutex held: the number of the calling thread, and the innermost node that runs on it.
int64_t this_thread();
Around around();

// Moves the oldest rows to a table with room for some, and returns how many.
template <typename Row>
int64_t take(std::vector<Row>& rows, int64_t* to, int64_t room) {
  const auto count = std::min<int64_t>(room, static_cast<int64_t>(rows.size()));
  std::copy_n(reinterpret_cast<const int64_t*>(rows.data()), count * (sizeof(Row) / sizeof(int64_t)), to);
  rows.erase(rows.begin(), rows.begin() + count);
  return count;
}

// A forked child must not wait for a mutex that another thread of its parent held.
void follow_forks();

}  // namespace ampmem
