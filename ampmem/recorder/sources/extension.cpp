// Records the blocks that PyTorch's allocators report to the profiler of a thread, and the autograd nodes around them.
//
// It stands in torch.profiler's place, so only one of the two can be on. Torch hands the place on to the autograd
// engine's threads, with the thread-local callbacks, for the backward passes that the thread starts. What it records
// goes into two tables of integers, which Python copies out as a whole (extension.py): nothing is formatted, no tree is
// made, and taking the tables does not stop the recording.
//
// Private parts of torch: ProfilerStateBase (torch/csrc/profiler/orchestration/observer.h). Everything else is declared
// in c10 and ATen. The library has no Python in it, so one build serves each Python of a torch.
//
// Threads add rows while another one takes them. So whoever takes rows says how much room there is, and gets the oldest.

#include "extension.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

std::mutex ampmem::mutex;
bool (*ampmem::cuda_report)(int64_t address, int64_t bytes) = nullptr;

namespace {

using ampmem::mutex;
using ampmem::now_ns;
using ampmem::take;
using ampmem::this_thread;
using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;

// Added to the number of a node that was made on another thread than the recorded one: ELSEWHERE of facts/log.py.
constexpr int64_t kElsewhere = int64_t{1} << 40;
constexpr int64_t kCpu = -1, kOtherDevice = -2;

struct Node {
  int64_t start_ns, name, own, number, thread;
};
struct Block {
  int64_t time_ns, address, bytes, total, device, name, own, number, thread;
};
struct Span {
  int64_t start_ns, end_ns, name, number, thread;
};
// Torch does not call the end of a node whose begin returned nothing.
struct Context : public at::ObserverContext {};

struct Tables {
  std::vector<Block> blocks;
  std::vector<Span> spans;
  std::deque<std::string> names{""};  // a deque: a name stays where it is while others are added
  std::unordered_map<std::string, int64_t> name_ids{{"", 0}};
};

// The mutex is that of all that follows, except for what is one thread's own. The tables are never destroyed: threads
// may allocate while the process ends.
Tables* tables = new Tables;
int64_t threads = 0, recorded_thread = 0, recording = 0;
std::atomic<const void*> active{nullptr};

thread_local int64_t thread_number = -1;
thread_local int64_t nodes_of_recording = 0;  // the recording that a thread's open nodes belong to
thread_local bool thread_ends = false;        // its open nodes are destroyed, and it may still free blocks

struct OpenNodes {
  std::vector<Node> nodes;
  ~OpenNodes() {
    thread_ends = true;
  }
};
thread_local OpenNodes open_nodes;

// The nodes that run on this thread, innermost last; those of an earlier recording have ended unseen.
std::vector<Node>& running_nodes() {
  if (thread_ends) {
    static auto& none = *new std::vector<Node>;
    return none;
  }
  if (nodes_of_recording != recording) {
    nodes_of_recording = recording;
    open_nodes.nodes.clear();
  }
  return open_nodes.nodes;
}

struct Observer : public ProfilerStateBase {
  // ProfilerState::CPU is what torch.profiler without kineto has; the second flag asks for memory.
  Observer() : ProfilerStateBase(ProfilerConfig(ProfilerState::CPU, false, true)) {}

  ActiveProfilerType profilerType() override {
    return ActiveProfilerType::NONE;
  }

  // Called by allocators, some of them while they free: nothing may be thrown.
  void reportMemoryUsage(void* address, int64_t bytes, size_t total, size_t, c10::Device device) noexcept override {
    try {
      report(address, bytes, total, device);
    } catch (...) {  // no memory: a row is lost
    }
  }

 private:
  void report(void* address, int64_t bytes, size_t total, c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex);
    if (active != this) {
      return;
    }
    if (device.is_cuda() && ampmem::cuda_report != nullptr &&
        ampmem::cuda_report(reinterpret_cast<int64_t>(address), bytes)) {
      return;
    }
    const auto& nodes = running_nodes();
    const Node around = nodes.empty() ? Node{0, 0, -1, -1, 0} : nodes.back();
    const int64_t where = device.is_cpu() ? kCpu : !device.is_cuda() ? kOtherDevice : std::max<int64_t>(device.index(), 0);
    tables->blocks.push_back(
        {now_ns(),
         reinterpret_cast<int64_t>(address),
         bytes,
         static_cast<int64_t>(total),
         where,
         around.name,
         around.own,
         around.number,
         this_thread()});
  }
};

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& node) {
  std::lock_guard<std::mutex> lock(mutex);
  if (active == nullptr) {
    return nullptr;
  }
  auto& names = tables->names;
  const auto known = tables->name_ids.try_emplace(node.name(), static_cast<int64_t>(names.size()));
  if (known.second) {
    names.push_back(known.first->first);
  }
  auto& nodes = running_nodes();
  if (thread_ends) {
    return nullptr;
  }
  const int64_t own = node.seqNr(), around = nodes.empty() ? -1 : nodes.back().number;
  // A node inside another on the engine's thread was made there, by a recomputed forward.
  const bool made_there = own >= 0 && around >= 0 && this_thread() != recorded_thread;
  // Ops that a node calls have no number of their own.
  const int64_t number = own < 0 ? around : made_there ? own + kElsewhere : own;
  nodes.push_back({now_ns(), known.first->second, own, number, this_thread()});
  return std::make_unique<Context>();
}

void node_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (active == nullptr || thread_ends || nodes_of_recording != recording || open_nodes.nodes.empty()) {
    return;
  }
  const Node node = open_nodes.nodes.back();
  open_nodes.nodes.pop_back();
  tables->spans.push_back({node.start_ns, now_ns(), node.name, node.number, node.thread});
}

// In a forked child: another thread of the parent may have held the mutex and been writing into the tables, and that
// thread is not there to go on.
void in_child() {
  new (&mutex) std::mutex();
  tables = new Tables;
}

}  // namespace

int64_t ampmem::now_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int64_t ampmem::this_thread() {
  if (thread_number < 0) {
    thread_number = threads++;
  }
  return thread_number;
}

ampmem::Around ampmem::around() {
  const auto& nodes = running_nodes();
  return nodes.empty() ? Around{0, -1} : Around{nodes.back().name, nodes.back().number};
}

void ampmem::follow_forks() {
  static const int follows = pthread_atfork(nullptr, nullptr, in_child);
  static_cast<void>(follows);
}

#define AMPMEM_EXPORT extern "C" __attribute__((visibility("default")))

// Begin to record the calling thread. 0, or 1 if torch refuses.
AMPMEM_EXPORT int ampmem_start() {
  try {
    ampmem::follow_forks();
    auto observer = std::make_shared<Observer>();
    Observer* const started = observer.get();
    {
      std::lock_guard<std::mutex> lock(mutex);
      ++recording;
      recorded_thread = this_thread();
      tables->blocks.clear();
      tables->spans.clear();
      active = started;
    }
    ProfilerStateBase::push(std::move(observer));
    started->setCallbackHandle(at::addThreadLocalCallback(
        at::RecordFunctionCallback(node_begins, node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION})));
    return 0;
  } catch (...) {
    active = nullptr;
    return 1;
  }
}

// Stop; called on the thread that has started. What was not taken is dropped at the next start. 0, or 1 on an error.
AMPMEM_EXPORT int ampmem_stop() {
  try {
    active = nullptr;
    const auto observer = ProfilerStateBase::pop(/*global=*/false);
    if (observer != nullptr) {
      observer->removeCallback();
    }
    return observer == nullptr;
  } catch (...) {
    return 1;
  }
}

// The number of blocks, of nodes that have ended, and of names so far.
AMPMEM_EXPORT void ampmem_count(int64_t* counts) {
  std::lock_guard<std::mutex> lock(mutex);
  counts[0] = static_cast<int64_t>(tables->blocks.size());
  counts[1] = static_cast<int64_t>(tables->spans.size());
  counts[2] = static_cast<int64_t>(tables->names.size());
}

// Move the oldest rows into two tables, as far as there is room: 9 integers for each block, 5 for each node. `taken`
// gets how many of each were moved.
AMPMEM_EXPORT void ampmem_take(
    int64_t* to_blocks, int64_t block_room, int64_t* to_spans, int64_t span_room, int64_t* taken) {
  std::lock_guard<std::mutex> lock(mutex);
  taken[0] = take(tables->blocks, to_blocks, block_room);
  taken[1] = take(tables->spans, to_spans, span_room);
}

// The name of a node.
AMPMEM_EXPORT const char* ampmem_name(int64_t index) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto& names = tables->names;
  return static_cast<size_t>(index) < names.size() ? names[static_cast<size_t>(index)].c_str() : "";
}
