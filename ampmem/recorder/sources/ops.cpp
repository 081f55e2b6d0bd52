// Records the ops of forward as ampmem's dispatch mode does (hooks/forward.py), without a mode and without Python.
//
// Torch calls a record function at each call of its dispatcher. A dispatch mode sees the ops that go below autograd and
// autocast: not those that torch decomposes into others there, not autocast's wrapper around an op, which casts the
// arguments and calls the op again, and not what the kernel of an op calls. The first of nested calls that is none of
// these is such an op.
//
// The state is the recorded thread's alone: what other threads ask for is not there, and what they tell is not heard. An
// exception are the casts, which have a mutex: any thread may swap tensors, and ask who holds which.
//
// What autograd saved is read from the op's node when the op ends, by the visitor with which compiled autograd reads
// it. Stacks are those of Python's frames, read through its C API (the GIL is taken for that); its functions are
// declared here, so that one build serves each Python of a torch.
//
// Private parts of torch: CompiledNodeArgs (torch/csrc/dynamo/compiled_autograd.h). Where this file does not compile,
// the extension is built without it, and the dispatch mode is used.

#include "extension.h"
#include "tensors.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pthread.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void* PyThreadState_Get();
void* PyThreadState_GetFrame(void*);
void* PyFrame_GetBack(void*);
void* PyFrame_GetCode(void*);
int PyFrame_GetLasti(void*);
void Py_IncRef(void*);
void Py_DecRef(void*);
}

namespace {

using ampmem::address_of;
using ampmem::Ids;
using ampmem::is_plain;
using ampmem::now_ns;
using ampmem::start_of;
using c10::DispatchKey;
using c10::DispatchKeySet;

struct Op {
  int64_t start_ns, end_ns, name, stack, sequence;
};
// What a row of facts is: OUTPUT and so on of sources/extension.py.
enum Kind : int64_t { kOutput, kSaved, kUse, kToCopy, kCopy };
struct Fact {
  int64_t time_ns, kind, address, name, form, source, start, flags;
};
enum Flags : int64_t { kView = 1, kLeaf = 2 };
// … and of an output of attention: which of its kernels were disabled, in the order of FUSED_ATTENTION (vocabulary.py).
enum Disabled : int64_t { kFlash = 1, kEfficient = 2, kCuDNN = 4 };

// What is known of an op by its schema.
struct Known {
  int64_t name = 0;
  size_t positional = 0, returns = 0;
  bool is_op = false, silent = false, view = false, makes = false, may_copy = false, may_cast = false;
  bool to_copy = false, copy = false;
  bool of_attention = false;  // a kernel of scaled_dot_product_attention, or its math kernel's
  bool of_autograd = false;   // autograd's kernel calls no other
  bool composite = false;     // torch decomposes it above autograd
  bool has_autograd = false;  // it has a kernel of autograd's own
  std::vector<DispatchKey> autocast;
};

// An op that runs.
struct Running : public at::ObserverContext {
  Running* outer = nullptr;
  const Known* known = nullptr;
  int64_t start_ns = 0, stack = 0, nodes = 0;
  bool guarded = false;  // its autograd kernel runs its other kernels with autograd excluded
  at::Tensor source;     // of a copy
};

// The results of the newest op: its node has saved all that it will when the next op comes, if it is alive then.
struct Returned {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> results;
  int64_t name = 0, number = 0;
};

// Never destroyed: threads may outlive the library's own objects.
struct State {
  std::vector<Op> ops;
  std::vector<Fact> facts;
  std::vector<std::string> names{""};
  std::unordered_map<std::string, int64_t> name_ids{{"", 0}};
  std::unordered_map<const char*, Known> known;
  ampmem::Forms forms;
  std::vector<const std::vector<int64_t>*> stacks{nullptr};  // code and instruction of each frame, innermost first
  Ids stack_ids{{{}, 0}};
  std::vector<void*> codes;  // of the stacks: a reference to each
  std::unordered_map<std::type_index, bool> saves;  // whether a class of nodes is one of torch's own ops
  Returned returned;
  int64_t running = 0;  // the name of the op that runs
  int64_t other = 0;    // ops that a dispatch mode has to look at
};
auto& state = *new State;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

// Casts, by storage; any thread may ask. No tensor is freed while the mutex is held.
class Casts {
 public:
  void add(int64_t address, WeakTensor cast) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [place, fresh] = casts_.try_emplace(address, std::move(cast));
    if (!fresh) {
      std::swap(place->second, cast);
    }
  }

  int64_t count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(casts_.size());
  }

  // How many references there are to the newest cast in this storage; one that was freed is forgotten.
  int64_t holders(int64_t address) {
    decltype(casts_)::node_type freed;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto cast = casts_.find(address);
    const auto holders = cast == casts_.end() ? 0 : static_cast<int64_t>(cast->second.use_count());
    if (cast != casts_.end() && holders == 0) {
      freed = casts_.extract(cast);
    }
    return holders;
  }

  void forget(int64_t address) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto forgotten = casts_.extract(address);
    lock.unlock();
  }

  void forget_freed() {
    std::vector<WeakTensor> freed;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto cast = casts_.begin(); cast != casts_.end();) {
      if (cast->second.expired()) {
        freed.push_back(std::move(cast->second));
        cast = casts_.erase(cast);
      } else {
        ++cast;
      }
    }
  }

  void clear() {
    decltype(casts_) forgotten;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(casts_, forgotten);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, WeakTensor> casts_;
};
auto& casts_seen = *new Casts;

std::atomic<pthread_t> owner{};  // the thread whose ops are recorded, or were last
bool is_owner() {
  return pthread_equal(owner, pthread_self()) != 0;
}

thread_local bool recorded = false;
thread_local Running* innermost = nullptr;
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
bool with_stacks = false;
void (*before_op)() = nullptr;  // of Python's: called before each op
void (*at_other)() = nullptr;   // of Python's: called once, after the first op that needs a mode

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() {
    PyGILState_Release(state_);
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  const int state_;
};

int64_t name_id(const std::string& name) {
  const auto found = state.name_ids.try_emplace(name, static_cast<int64_t>(state.names.size()));
  if (found.second) {
    state.names.push_back(name);
  }
  return found.first->second;
}

const Known& known_of(const at::RecordFunction& call) {
  const char* key = call.name();
  const auto found = state.known.find(key);
  if (found != state.known.end()) {
    return found->second;
  }
  Known known;
  const auto operator_name = call.operator_name();
  const auto op = operator_name ? c10::Dispatcher::singleton().findOp(*operator_name) : std::nullopt;
  if (op && op->hasSchema()) {
    const auto& schema = op->schema();
    const std::string& name = schema.name();
    known.is_op = true;
    known.name = name_id(name);
    known.silent = name == "aten::detach" || name == "prim::device";
    known.of_autograd = name == "aten::detach_";
    bool aliases = false;
    for (const auto& value : schema.returns()) {
      aliases |= value.alias_info() != nullptr;
      known.view |= value.alias_info() != nullptr && !value.alias_info()->isWrite();
    }
    known.makes = !aliases;
    known.returns = schema.returns().size();
    if (known.view &&
        (name == "aten::to" || name == "aten::contiguous" || name == "aten::flatten" || name == "aten::reshape")) {
      known.view = false;
      known.may_copy = true;
      known.may_cast = name == "aten::to";
    }
    known.to_copy = name == "aten::_to_copy" && operator_name->overload_name.empty();
    for (const std::string_view kernel : {"aten::_scaled_dot_product", "aten::_safe_softmax"}) {
      known.of_attention |= name.compare(0, kernel.size(), kernel) == 0;
    }
    known.copy = name == "aten::copy_" && operator_name->overload_name.empty();
    for (const auto& argument : schema.arguments()) {
      known.positional += !argument.kwarg_only();
    }
    for (const auto key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA, DispatchKey::Autograd}) {
      known.has_autograd |= op->hasKernelForDispatchKey(key);
    }
    // As in the dispatcher's table: a kernel for all of autograd comes after one that decomposes.
    known.composite = op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    for (const auto key :
         {DispatchKey::CompositeExplicitAutograd,
          DispatchKey::CPU,
          DispatchKey::CUDA,
          DispatchKey::AutogradCPU,
          DispatchKey::AutogradCUDA}) {
      known.composite &= !op->hasKernelForDispatchKey(key);
    }
    for (const auto key : {DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}) {
      if (op->hasKernelForDispatchKey(key) && !op->isKernelFallthroughKernel(key)) {
        known.autocast.push_back(key);
      }
    }
  }
  return state.known.emplace(key, std::move(known)).first->second;
}

// Calls `each` with the tensors of a value, those of a list, too.
template <typename Each>
void for_tensors(const c10::IValue& value, const Each& each) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined()) {
      each(tensor);
    }
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) {
        each(tensor);
      }
    }
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) {
        each(item.toTensor());
      }
    }
  }
}

void note(Kind kind, const at::Tensor& tensor, int64_t name) {
  if (is_plain(tensor)) {
    state.facts.push_back({now_ns(), kind, address_of(tensor), name, state.forms.id(tensor), 0, 0, 0});
  } else {
    ++state.other;
  }
}

// The id of the stack of Python's frames on this thread.
int64_t stack_id() {
  if (!with_stacks) {
    return 0;
  }
  static thread_local std::vector<int64_t> stack;
  stack.clear();
  const Gil gil;
  void* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr) {
    void* const code = PyFrame_GetCode(frame);
    stack.push_back(reinterpret_cast<int64_t>(code));
    stack.push_back(PyFrame_GetLasti(frame));
    Py_DecRef(code);  // the frame has a reference, too
    void* const back = PyFrame_GetBack(frame);
    Py_DecRef(frame);
    frame = back;
  }
  auto found = state.stack_ids.find(stack);
  if (found == state.stack_ids.end()) {
    for (size_t place = 0; place < stack.size(); place += 2) {
      void* const code = reinterpret_cast<void*>(stack[place]);
      Py_IncRef(code);
      state.codes.push_back(code);
    }
    found = state.stack_ids.emplace(stack, static_cast<int64_t>(state.stacks.size())).first;
    state.stacks.push_back(&found->first);
  }
  return found->second;
}

// Whether a mode would not see this call: it sees what the call becomes.
bool passes(const Known& known, DispatchKeySet keys, const c10::impl::LocalDispatchKeySet& local) {
  const auto active = [&](DispatchKey key) { return keys.has(key) && !local.excluded_.has(key); };
  for (const auto key : known.autocast) {
    if (active(key)) {
      return true;
    }
  }
  if (active(DispatchKey::AutogradFunctionality)) {
    return known.composite || known.of_autograd;
  }
  // In inference mode it is one op, unless it may cast: under a dispatch mode autocast is off inside of an op.
  return known.composite && !known.may_copy && (active(DispatchKey::AutocastCPU) || active(DispatchKey::AutocastCUDA));
}

bool is_of_torch(const torch::autograd::Node& node) {
  const auto& type = typeid(node);
  const auto found = state.saves.find(type);
  if (found != state.saves.end()) {
    return found->second;
  }
  return state.saves.emplace(type, std::strstr(type.name(), "autograd9generated") != nullptr).first->second;
}

// Notes what the node that made one of the newest op's results has saved.
void read_saved() {
  Returned returned;
  std::swap(returned, state.returned);
  for (const auto& result : returned.results) {
    auto alive = result.lock();
    if (!alive) {
      continue;
    }
    const at::Tensor tensor(std::move(alive));
    const auto node = tensor.grad_fn();
    if (!node) {
      continue;
    }
    if (static_cast<int64_t>(node->sequence_nr()) != returned.number || !is_of_torch(*node)) {
      return;  // an older node: the op made none
    }
    namespace compiled = torch::dynamo::autograd;
    compiled::AutogradCompilerCall asked(compiled::SizeInput::STATIC);
    compiled::NodeCall about(0, node);
    try {
      compiled::CompiledNodeArgs arguments(asked, about);
      node->compiled_args(arguments);
    } catch (const std::exception&) {  // overwritten since
    }
    for (const auto& saved : asked.tensor_args.inputs) {
      note(kSaved, saved, returned.name);
    }
    return;
  }
}

// Notes that the newest op returned these; with gradients off, or under hooks of the script, nothing is to be read.
void op_returned(const std::vector<c10::IValue>& results, int64_t name, int64_t number) {
  if (!at::GradMode::is_enabled() || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    return;
  }
  for (const auto& value : results) {
    for_tensors(value, [&](const at::Tensor& tensor) {
      if (tensor.requires_grad() && !tensor.is_view()) {
        state.returned.results.emplace_back(tensor.getIntrusivePtr());
      }
    });
  }
  state.returned.name = name;
  state.returned.number = number;
}

std::unique_ptr<at::ObserverContext> begun(const at::RecordFunction& call) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  if (innermost != nullptr &&
      (!innermost->guarded || local.excluded_.has(DispatchKey::AutogradFunctionality))) {
    return nullptr;  // inside of an op's kernel
  }
  if (local.excluded_.has(DispatchKey::Python)) {
    return nullptr;  // hidden from modes
  }
  const Known& known = known_of(call);
  if (!known.is_op) {
    return nullptr;
  }
  if (innermost == nullptr && local.excluded_.has(DispatchKey::AutogradFunctionality) &&
      !local.excluded_.has(DispatchKey::ADInplaceOrView) && !c10::InferenceMode::is_enabled()) {
    ++state.other;  // inside of an op in Python, whose call torch did not report; torch.ones excludes both keys
  }
  DispatchKeySet keys;
  for (const auto& value : call.inputs()) {
    for_tensors(value, [&](const at::Tensor& tensor) { keys = keys | tensor.key_set(); });
  }
  if (passes(known, keys, local)) {
    return nullptr;
  }
  auto running = std::make_unique<Running>();
  running->known = &known;
  running->outer = innermost;
  running->guarded = known.has_autograd && keys.has(DispatchKey::AutogradFunctionality) &&
      !local.excluded_.has(DispatchKey::AutogradFunctionality);
  if (!known.silent) {
    if (before_op != nullptr) {
      before_op();
    }
    read_saved();
    if (!is_plain(keys) || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      ++state.other;
    }
    const auto inputs = call.inputs();
    if (!known.view && casts_seen.count() != 0) {
      for (size_t place = 0; place < std::min(inputs.size(), known.positional); ++place) {
        for_tensors(inputs[place], [&](const at::Tensor& tensor) {
          const int64_t address = address_of(tensor);
          if (casts_seen.holders(address) != 0) {
            state.facts.push_back({now_ns(), kUse, address, known.name, 0, 0, 0, 0});
          }
        });
      }
    }
    if (known.to_copy || known.may_copy) {
      running->source = inputs[0].toTensor();
    } else if (known.copy) {
      running->source = inputs[1].toTensor();
    }
    running->stack = stack_id();
    state.running = known.name;
  }
  running->nodes = static_cast<int64_t>(at::sequence_number::peek());
  running->start_ns = now_ns();
  innermost = running.get();
  return running;
}

// Whether autocast makes such a copy: of a floating tensor, in another floating dtype.
bool casts(const at::Tensor& source, const at::Tensor& target) {
  return c10::isFloatingType(source.scalar_type()) && c10::isFloatingType(target.scalar_type()) &&
      source.scalar_type() != target.scalar_type();
}

void note_cast(Kind kind, const at::Tensor& source, const at::Tensor& target) {
  if (!is_plain(source) || !is_plain(target) || !casts(source, target)) {
    return;
  }
  const int64_t address = address_of(target), flags =
      (source.is_view() ? kView : 0) | (source.is_leaf() && source.requires_grad() ? kLeaf : 0);
  state.facts.push_back(
      {now_ns(), kind, address, 0, state.forms.id(target), address_of(source), start_of(source), flags});
  if (kind == kToCopy) {
    casts_seen.add(address, WeakTensor(target.getIntrusivePtr()));
  }
}

void note_outputs(const std::vector<c10::IValue>& results, int64_t name) {
  for (const auto& value : results) {
    if (results.size() == 1 || value.isTensor()) {
      for_tensors(value, [&](const at::Tensor& tensor) { note(kOutput, tensor, name); });
    }
  }
}

int64_t disabled_kernels() {
  const auto& context = at::globalContext();
  return (context.userEnabledFlashSDP() ? 0 : kFlash) | (context.userEnabledMemEfficientSDP() ? 0 : kEfficient) |
      (context.userEnabledCuDNNSDP() ? 0 : kCuDNN);
}

void ended(const at::RecordFunction& call, Running* running) {
  innermost = running->outer;
  const Known& known = *running->known;
  if (known.silent) {
    return;
  }
  state.running = 0;
  const auto& results = call.outputs();
  if (results.size() != known.returns) {
    return;  // it has raised
  }
  // The op's own node comes first; autograd may have made more since.
  const auto nodes = static_cast<int64_t>(at::sequence_number::peek());
  const int64_t number = std::min(nodes - 1, running->nodes), end_ns = now_ns();
  state.ops.push_back({running->start_ns, end_ns, known.name, running->stack, number});
  if (innermost != nullptr) {
    innermost->start_ns = now_ns();  // this op was called by the outer one's autograd kernel, before its own
    innermost->nodes = nodes;
  }
  read_saved();
  if (known.view) {
    return;
  }
  if (known.makes) {
    const auto first = state.facts.size();
    note_outputs(results, known.name);
    if (known.of_attention && state.facts.size() > first) {
      state.facts[first].flags = disabled_kernels();
    }
    if (known.to_copy && !results.empty()) {
      note_cast(kToCopy, running->source, results[0].toTensor());
    }
  } else if (known.copy && !results.empty()) {
    note_cast(kCopy, running->source, results[0].toTensor());
  } else if (known.may_copy && !results.empty() && address_of(results[0].toTensor()) != address_of(running->source)) {
    note_outputs(results, known.name);
    if (known.may_cast) {
      note_cast(kToCopy, running->source, results[0].toTensor());
    }
  }
  op_returned(results, known.name, number);
}

// Torch writes what a callback throws to standard error, which is the script's.
std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& call) {
  if (!recorded) {
    return nullptr;
  }
  try {
    return begun(call);
  } catch (...) {
    ++state.other;
    return nullptr;
  }
}

void ends(const at::RecordFunction& call, at::ObserverContext* context) {
  auto* const running = static_cast<Running*>(context);
  if (!recorded || running == nullptr || innermost != running) {
    return;
  }
  try {
    ended(call, running);
  } catch (...) {
    ++state.other;
  }
  if (state.other != 0 && innermost == nullptr && at_other != nullptr) {
    const auto call_once = at_other;
    at_other = nullptr;
    call_once();
  }
}

// In a forked child: if another thread forks than the recorded one, that may have been writing.
void in_child() {
  new (&casts_seen) Casts;
  if (!is_owner()) {
    new (&state) State;
    handle = at::INVALID_CALLBACK_HANDLE;
    before_op = at_other = nullptr;
  }
}

}  // namespace

#define AMPMEM_EXPORT extern "C" __attribute__((visibility("default")))

// Begin to record the ops of the calling thread; `other` is called after the first that needs a mode. 0, or 1 if torch
// refuses.
AMPMEM_EXPORT int ampmem_ops_start(int64_t stacks, void (*other)()) {
  try {
    if (handle != at::INVALID_CALLBACK_HANDLE || !is_owner()) {
      return 1;
    }
    innermost = nullptr;
    state.running = 0;
    with_stacks = stacks != 0;
    at_other = other;
    handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begins, ends).needsInputs(true).needsOutputs(true).scopes(
            {at::RecordScope::FUNCTION}));
    recorded = true;
    return 0;
  } catch (...) {
    return 1;
  }
}

// Stop, on the thread that has started; what was recorded stays.
AMPMEM_EXPORT void ampmem_ops_stop() {
  recorded = false;
  innermost = nullptr;
  if (!is_owner()) {
    return;
  }
  state.running = 0;
  before_op = at_other = nullptr;
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

// Note what the newest op's node has saved, before the next op comes.
AMPMEM_EXPORT void ampmem_ops_read() {
  if (!recorded) {
    return;
  }
  try {
    read_saved();
  } catch (...) {
    ++state.other;
  }
}

// Have a function called before the next op, or none any more.
AMPMEM_EXPORT void ampmem_ops_before(void (*call)()) {
  if (is_owner()) {
    before_op = call;
  }
}

// Forget everything: a new recording begins, of the calling thread.
AMPMEM_EXPORT void ampmem_ops_clear() {
  static const int follows = pthread_atfork(nullptr, nullptr, in_child);
  static_cast<void>(follows);
  {
    const Gil gil;
    for (void* const code : std::exchange(state.codes, {})) {
      Py_DecRef(code);
    }
  }
  state = State();
  casts_seen.clear();
  owner = pthread_self();
}

// The numbers of ops, facts, names, forms and stacks; of ops that need a mode; the name of the op that runs.
AMPMEM_EXPORT void ampmem_ops_count(int64_t* counts) {
  std::fill_n(counts, 7, 0);
  if (!is_owner()) {
    return;
  }
  const size_t sizes[] = {
      state.ops.size(), state.facts.size(), state.names.size(), state.forms.count(), state.stacks.size()};
  std::copy(std::begin(sizes), std::end(sizes), counts);
  counts[5] = state.other;
  counts[6] = state.running;
}

// Move the oldest rows into two tables, as far as there is room: 5 integers for each op, 8 for each fact. `taken` gets how
// many of each were moved. Ops may have run since they were counted: of what Python's garbage collector frees.
AMPMEM_EXPORT void ampmem_ops_take(int64_t* ops, int64_t op_room, int64_t* facts, int64_t fact_room, int64_t* taken) {
  const bool is_ours = is_owner();
  taken[0] = ampmem::take(state.ops, ops, is_ours ? op_room : 0);
  taken[1] = ampmem::take(state.facts, facts, is_ours ? fact_room : 0);
}

// The name of an op.
AMPMEM_EXPORT const char* ampmem_ops_name(int64_t index) {
  return state.names[static_cast<size_t>(index)].c_str();
}

// The dtype of a form; its sizes go to `to`, their number to `count`.
AMPMEM_EXPORT const char* ampmem_ops_form(int64_t index, const int64_t** to, int64_t* count) {
  return state.forms.read(index, to, count);
}

// The frames of a stack: code and instruction of each, innermost first; returns the number of integers.
AMPMEM_EXPORT int64_t ampmem_ops_stack(int64_t index, const int64_t** to) {
  const auto& stack = *state.stacks[static_cast<size_t>(index)];
  *to = stack.data();
  return static_cast<int64_t>(stack.size());
}

// The number of casts that may be alive.
AMPMEM_EXPORT int64_t ampmem_ops_copies() {
  return casts_seen.count();
}

// How many references there are to the newest cast in this storage; 0 if it was freed.
AMPMEM_EXPORT int64_t ampmem_ops_holders(int64_t address) {
  return casts_seen.holders(address);
}

// Forget the cast in this storage, or, of address 0, those that were freed.
AMPMEM_EXPORT void ampmem_ops_forget(int64_t address) {
  if (address != 0) {
    casts_seen.forget(address);
  } else {
    casts_seen.forget_freed();
  }
}
