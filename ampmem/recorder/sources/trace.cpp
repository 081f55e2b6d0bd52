// Records what PyTorch's CUDA caching allocator does, as the trace of its memory history has it.
//
// The allocator calls a tracker for each entry of its trace, under its own lock. The tracker appends one row of
// integers with the time of time.time_ns; the size of the block comes right after it, by the report to the profiler of
// the same thread (extension.cpp). So nothing has to be copied, cleared or matched at a step's end. The stack is the
// one that the allocator gathers for its history, which must be on; equal stacks are kept once.
//
// Torch cannot detach a tracker: there is one for the life of the process, which returns at once while nothing is
// recorded. It takes no GIL, and frees no Python object: it is called with the allocator's lock held.
//
// Private parts of torch: attachAllocatorTraceTracker (c10/cuda/CUDACachingAllocator.h) and the frames of a
// CapturedTraceback (torch/csrc/profiler/combined_traceback.h). This file is compiled only for a CUDA build of torch,
// where CUDA's headers are. It needs no headers of Python.

#include "extension.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <pthread.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

// A traceback's frames are private: an explicit instantiation may name them.
template <auto member>
struct Opened {
  friend const std::vector<torch::CapturedTraceback::PyFrame>& frames_of(const torch::CapturedTraceback& traceback) {
    return traceback.*member;
  }
};
const std::vector<torch::CapturedTraceback::PyFrame>& frames_of(const torch::CapturedTraceback& traceback);
template struct Opened<&torch::CapturedTraceback::frames_>;

namespace {

using ampmem::mutex;
using c10::CachingDeviceAllocator::TraceEntry;
using torch::CapturedTraceback;

struct Row {
  int64_t time_ns, kind, device, address, size, stream, thread, stack, name, number, block, pool, shared_pool;
};
constexpr size_t kMost = 2'000'000;  // rows that are kept, as ENTRIES of cuda/source.py

struct Tables {
  std::vector<Row> rows;
  int64_t taken = 0, dropped = 0;  // rows
  std::vector<std::shared_ptr<c10::GatheredContext>> stacks;  // each keeps its code objects alive
  std::unordered_multimap<size_t, int64_t> stack_numbers;     // from 1 on, by the hash of the frames
};

// The mutex is that of all that follows, except for what is one thread's own. The tables are never destroyed: the
// allocator may free blocks after that, at the end of the process.
Tables* tables = new Tables;
std::atomic<bool> tracing{false};

struct Newest {
  int64_t row = -1, address = 0;
};
thread_local Newest newest_alloc, newest_free;

int64_t rows_so_far() {
  return tables->taken + static_cast<int64_t>(tables->rows.size());
}

// The index in KINDS of cuda/trace.py; 0 for what is not needed.
int64_t kind_of(TraceEntry::Action action) {
  switch (action) {
    case TraceEntry::ALLOC:
      return 1;
    case TraceEntry::FREE_REQUESTED:
      return 2;
    case TraceEntry::FREE_COMPLETED:
      return 3;
    case TraceEntry::SNAPSHOT:
      return 4;
    case TraceEntry::SEGMENT_ALLOC:
      return 5;
    case TraceEntry::SEGMENT_MAP:
      return 6;
    case TraceEntry::SEGMENT_FREE:
      return 7;
    case TraceEntry::SEGMENT_UNMAP:
      return 8;
    default:
      return 0;
  }
}

int64_t number_of(const std::shared_ptr<c10::GatheredContext>& context) {
  const auto* traceback = dynamic_cast<const CapturedTraceback*>(context.get());
  if (traceback == nullptr || frames_of(*traceback).empty()) {
    return 0;
  }
  const auto& frames = frames_of(*traceback);
  size_t hash = frames.size();
  for (const auto& frame : frames) {
    hash = (hash ^ reinterpret_cast<size_t>(frame.code)) * 0x9E3779B97F4A7C15 + static_cast<size_t>(frame.lasti);
    hash ^= hash >> 32;
  }
  const auto [first, last] = tables->stack_numbers.equal_range(hash);
  for (auto known = first; known != last; ++known) {
    const auto& others = frames_of(static_cast<const CapturedTraceback&>(*tables->stacks[known->second - 1]));
    const auto same = [](const auto& a, const auto& b) { return a.code == b.code && a.lasti == b.lasti; };
    if (std::equal(frames.begin(), frames.end(), others.begin(), others.end(), same)) {
      return known->second;
    }
  }
  tables->stacks.push_back(context);
  const auto number = static_cast<int64_t>(tables->stacks.size());
  tables->stack_numbers.emplace(hash, number);
  return number;
}

void track(const TraceEntry& entry) noexcept {
  if (!tracing.load(std::memory_order_relaxed)) {
    return;
  }
  const int64_t kind = kind_of(entry.action_);
  if (kind == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (!tracing) {
    return;
  }
  try {
    if (tables->rows.size() >= kMost) {
      ++tables->dropped;
      return;
    }
    const bool allocates = entry.action_ == TraceEntry::ALLOC;
    const int64_t address = static_cast<int64_t>(entry.addr_);
    const auto around = ampmem::around();
    tables->rows.push_back(
        {ampmem::now_ns(),
         kind,
         entry.device_,
         address,
         static_cast<int64_t>(entry.size_),
         reinterpret_cast<int64_t>(entry.stream_),
         ampmem::this_thread(),
         allocates && entry.context_ ? number_of(entry.context_) : 0,
         around.name,
         around.number,
         0,
         static_cast<int64_t>(entry.mempool_.first),
         static_cast<int64_t>(entry.mempool_.second)});
    if (allocates || entry.action_ == TraceEntry::FREE_REQUESTED) {
      (allocates ? newest_alloc : newest_free) = {rows_so_far() - 1, address};
    }
  } catch (...) {  // no memory on the host
    ++tables->dropped;
  }
}

// The allocator reports a block's size after the row, on the same thread.
bool report(int64_t address, int64_t bytes) {
  if (!tracing) {
    return false;
  }
  auto& newest = bytes > 0 ? newest_alloc : newest_free;
  auto& rows = tables->rows;
  const int64_t place = newest.row - tables->taken;
  if (newest.address == address && place >= 0 && place < static_cast<int64_t>(rows.size()) &&
      rows[place].address == address) {
    rows[place].block = bytes < 0 ? -bytes : bytes;
  }
  newest = {};
  return true;
}

// A forked child has no allocator to trace, and another thread of the parent may have been writing into the tables. The
// mutex is made anew by extension.cpp.
void in_child() {
  tracing = false;
  tables = new Tables;
}

}  // namespace

#define AMPMEM_EXPORT extern "C" __attribute__((visibility("default")))

// Begin to trace all devices; CUDA must be initialized. 0, or 1 if torch refuses.
AMPMEM_EXPORT int ampmem_trace_start() {
  try {
    ampmem::follow_forks();
    static const int follows = pthread_atfork(nullptr, nullptr, in_child);
    static const bool attached = (c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(track), true);
    static_cast<void>(follows);
    static_cast<void>(attached);
    Tables old;  // its stacks are destroyed without the mutex: torch takes a lock of its own for that
    const std::lock_guard<std::mutex> lock(mutex);
    std::swap(*tables, old);
    ampmem::cuda_report = report;
    tracing = true;
    return 0;
  } catch (...) {
    return 1;
  }
}

// Stop, and forget the stacks; what was not taken is dropped.
AMPMEM_EXPORT void ampmem_trace_stop() {
  Tables old;
  const std::lock_guard<std::mutex> lock(mutex);
  tracing = false;
  ampmem::cuda_report = nullptr;
  std::swap(*tables, old);
}

// The numbers of rows, of stacks, and of rows that found no place.
AMPMEM_EXPORT void ampmem_trace_count(int64_t* counts) {
  const std::lock_guard<std::mutex> lock(mutex);
  counts[0] = static_cast<int64_t>(tables->rows.size());
  counts[1] = static_cast<int64_t>(tables->stacks.size());
  counts[2] = tables->dropped;
}

// Move the oldest rows into a table of 13 integers for each, as far as there is room; returns how many.
AMPMEM_EXPORT int64_t ampmem_trace_take(int64_t* to, int64_t room) {
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t count = ampmem::take(tables->rows, to, room);
  tables->taken += count;
  return count;
}

// The frames of a stack, counted from 0: code and instruction of each, innermost first; returns the number of integers.
AMPMEM_EXPORT int64_t ampmem_trace_stack(int64_t index, const int64_t** to) {
  static std::vector<int64_t> stack;  // of the thread that records, the only one to ask
  const std::lock_guard<std::mutex> lock(mutex);
  stack.clear();
  if (static_cast<size_t>(index) < tables->stacks.size()) {
    const auto& traceback = static_cast<const CapturedTraceback&>(*tables->stacks[static_cast<size_t>(index)]);
    for (const auto& frame : frames_of(traceback)) {
      stack.push_back(reinterpret_cast<int64_t>(frame.code));
      stack.push_back(frame.lasti);
    }
  }
  *to = stack.data();
  return static_cast<int64_t>(stack.size());
}

// The allocator's statistics of a device; the number of rows before and after they were read, and the time then; the
// number of this thread. 0, or 1 on an error.
AMPMEM_EXPORT int ampmem_trace_stats(int64_t device, int64_t* to) {
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      to[7] = rows_so_far();
    }
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    to[0] = stats.allocation[0].current;
    to[1] = stats.requested_bytes[0].current;
    to[2] = stats.allocated_bytes[0].current;
    to[3] = stats.active_bytes[0].current;
    to[4] = stats.reserved_bytes[0].current;
    to[5] = stats.allocated_bytes[0].peak;
    to[6] = stats.allocation[0].allocated + stats.allocation[0].freed;
    const std::lock_guard<std::mutex> lock(mutex);
    to[8] = rows_so_far();
    to[9] = ampmem::now_ns();
    to[10] = ampmem::this_thread();
    return 0;
  } catch (...) {
    return 1;
  }
}
