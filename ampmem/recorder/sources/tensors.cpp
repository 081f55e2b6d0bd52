// Logs the facts of hooks about many tensors at once: those that modules hold, gradients, and the state of optimizers.
//
// In each step they are the same facts, but for times and addresses. Python logs them once, tensor by tensor; what it has
// logged is kept with the tensors that were read here just before. While the same are read again, the facts are logged
// anew from here. Only plain tensors are read: where there is something else, Python logs all. Nothing of the script's is
// kept: objects are known by their addresses, and used while Python's caller has them.
//
// All functions are called with the GIL held, which guards the tables. Python's C API is declared here, so that one
// build serves each Python of a torch. Python checks before use that its tensors are laid out as TensorObject is.

#include "extension.h"
#include "tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace {

struct Object {
  int64_t references;
  const void* type;
};
struct TensorObject : public Object {
  at::Tensor tensor;
};
struct MethodDef {
  const char* name;
  Object* (*function)(Object*, Object*);
  int flags;
  const char* text;
};
constexpr int kOneArgument = 8;  // METH_O

}  // namespace

extern "C" {
extern Object _Py_NoneStruct, PyBool_Type, PyDict_Type, PyFloat_Type, PyList_Type, PyLong_Type, PyUnicode_Type;
void Py_DecRef(Object*);
Object* Py_BuildValue(const char*, ...);
void PyErr_Clear();
Object* PyCFunction_NewEx(MethodDef*, Object*, Object*);
Object* PyDict_GetItem(Object*, Object*);
int PyDict_Next(Object*, ptrdiff_t*, Object**, Object**);
Object* PyList_GetItem(Object*, ptrdiff_t);
ptrdiff_t PyList_Size(Object*);
long long PyLong_AsLongLong(Object*);
Object* PyObject_CallFunctionObjArgs(Object*, ...);
Object* PyObject_GenericGetDict(Object*, void*);
Object* PyTuple_GetItem(Object*, ptrdiff_t);
}

namespace {

using ampmem::address_of;
using ampmem::is_plain;
using ampmem::start_of;

// A tensor. `object`, and the keys to it, stand for Python's objects by their addresses.
struct Row {
  int64_t outer_key, key, object, form, flags, address, start;
};
enum Flags : int64_t { kLeaf = 1, kRequiresGradient = 2, kInMemory = 4 };

// A row of FactColumns; of one by on_gradient the shape is -1, and the dtype a form.
struct Fact {
  int64_t time_ns, address, fact, name, module, dtype, shape;
};

// The facts that Python has logged about tensors; `key` stands for what else they depend on.
struct Known {
  int64_t key = -1;
  std::vector<Row> rows;
  std::vector<Fact> facts;
};

// Never destroyed: threads may outlive the library's own objects.
struct Tables {
  std::vector<Row> rows;  // read last
  std::vector<Fact> facts;
  std::unordered_map<int64_t, Known> known;
  ampmem::Forms forms;
};
auto& tables = *new Tables;
const void* tensor_types[2] = {};

int64_t number_of(const Object* object) {
  return reinterpret_cast<int64_t>(object);
}

bool is_list(const Object* object) {
  return object->type == &PyList_Type;
}

bool is_dict(const Object* object) {
  return object != nullptr && object->type == &PyDict_Type;
}

bool is_number_or_text(const Object* object) {
  const void* const type = object->type;
  return type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || type == &PyUnicode_Type ||
      object == &_Py_NoneStruct;
}

// The tensor that Python has as `object`; null if that is not a plain one.
const at::Tensor* tensor_of(const Object* object) {
  if (object->type != tensor_types[0] && object->type != tensor_types[1]) {
    return nullptr;
  }
  const auto& tensor = static_cast<const TensorObject*>(object)->tensor;
  return tensor.defined() && is_plain(tensor) ? &tensor : nullptr;
}

// Adds the row of a tensor, of which `object` may be another.
void add(int64_t outer_key, int64_t key, const Object* object, const at::Tensor& tensor) {
  const int64_t address = address_of(tensor);
  const int64_t flags = (tensor.is_leaf() ? kLeaf : 0) | (tensor.requires_grad() ? kRequiresGradient : 0) |
      (address != 0 ? kInMemory : 0);
  tables.rows.push_back(
      {outer_key,
       key,
       number_of(object),
       tables.forms.id(tensor),
       flags,
       address,
       start_of(tensor)});
}

// Adds the row of what a module has as `key` in its dictionary `kind`, if that is a tensor or nothing.
bool read_held(Object* module, Object* kind, Object* key) {
  Object* const attributes = PyObject_GenericGetDict(module, nullptr);  // the module's own, whatever its class says
  if (attributes == nullptr) {
    return false;
  }
  Object* const own = PyDict_GetItem(attributes, kind);
  const Object* const held = is_dict(own) ? PyDict_GetItem(own, key) : nullptr;
  const auto* const tensor = held == nullptr ? nullptr : tensor_of(held);
  if (tensor != nullptr) {
    add(0, 0, held, *tensor);
  }
  Py_DecRef(attributes);
  return tensor != nullptr || (is_dict(own) && (held == nullptr || held == &_Py_NoneStruct));
}

bool read_modules(Object* places, Object* kind) {
  for (ptrdiff_t place = 0; place < PyList_Size(places); place += 2) {
    Object* const module = PyObject_CallFunctionObjArgs(PyList_GetItem(places, place), nullptr);  // a weak reference
    const bool read = module != nullptr &&
        (module == &_Py_NoneStruct || read_held(module, kind, PyList_GetItem(places, place + 1)));
    Py_DecRef(module);
    if (!read) {
      return false;
    }
  }
  return true;
}

bool read_gradients(Object* groups) {
  for (ptrdiff_t group = 0; group < PyList_Size(groups); ++group) {
    Object* const parameters = PyList_GetItem(groups, group);
    if (!is_list(parameters)) {
      return false;
    }
    for (ptrdiff_t place = 0; place < PyList_Size(parameters); ++place) {
      const Object* const parameter = PyList_GetItem(parameters, place);
      const auto* const tensor = tensor_of(parameter);
      if (tensor == nullptr || !tensor->is_leaf()) {
        return false;
      }
      const at::Tensor gradient = tensor->grad();  // a reference of our own: another thread may train the same model
      if (gradient.defined() && !is_plain(gradient)) {
        return false;
      }
      if (gradient.defined()) {
        add(0, tables.forms.id(*tensor), parameter, gradient);
      }
    }
  }
  return true;
}

// Whether Python compares the values of a parameter and of its state: these change.
bool may_be_master(const at::Tensor& parameter, const at::Tensor& state) {
  return state.is_cpu() && state.is_floating_point() && parameter.is_floating_point() &&
      state.scalar_type() != parameter.scalar_type() && state.numel() == parameter.numel();
}

bool read_state(Object* states) {
  Object *parameter = nullptr, *state = nullptr, *key = nullptr, *value = nullptr;
  for (ptrdiff_t place = 0; PyDict_Next(states, &place, &parameter, &state);) {
    const auto* const owner = tensor_of(parameter);
    if (owner == nullptr || !is_dict(state)) {
      return false;
    }
    for (ptrdiff_t within = 0; PyDict_Next(state, &within, &key, &value);) {
      const auto* const tensor = tensor_of(value);
      if (key->type != &PyUnicode_Type || (tensor == nullptr && !is_number_or_text(value))) {
        return false;
      }
      if (tensor != nullptr && may_be_master(*owner, *tensor)) {
        return false;
      }
      if (tensor != nullptr) {
        add(number_of(parameter), number_of(key), value, *tensor);
      }
    }
  }
  return true;
}

bool same_tensors(const Row& a, const Row& b) {
  return std::memcmp(&a, &b, offsetof(Row, address)) == 0;
}

bool same_places(const Row& a, const Row& b) {
  return std::memcmp(&a, &b, sizeof(Row)) == 0;
}

enum Found : int64_t { kUnreadable, kRead, kRepeated };  // as in facts/tensors.py

// Reads tensors, and logs what is known of them if they are the same as then.
template <typename Same, typename Read>
Found repeat(int64_t number, int64_t key, const Same& same, const Read& read) {
  auto& rows = tables.rows;
  try {
    rows.clear();
    if (!read()) {
      PyErr_Clear();
      return kUnreadable;
    }
    const auto& known = tables.known[number];
    if (known.key != key || !std::equal(rows.begin(), rows.end(), known.rows.begin(), known.rows.end(), same)) {
      return kRead;
    }
    const int64_t now = ampmem::now_ns();
    auto fact = tables.facts.insert(tables.facts.end(), known.facts.begin(), known.facts.end());
    for (const auto& row : rows) {
      fact->time_ns = now;
      (fact++)->address = row.address;
    }
    return kRepeated;
  } catch (...) {  // no memory
    return kUnreadable;
  }
}

// A parameter's gradient was accumulated. `self` has what Python would call, the fact to log, and the ids of the
// parameter's name and of its module's.
Object* on_gradient(Object* self, Object* parameter) {
  const auto* const tensor = tensor_of(parameter);
  try {
    const at::Tensor gradient = tensor == nullptr ? at::Tensor() : tensor->grad();
    if (tensor != nullptr && tensor->is_leaf() && (!gradient.defined() || is_plain(gradient))) {
      if (gradient.defined()) {
        const auto of_self = [&](ptrdiff_t place) { return PyLong_AsLongLong(PyTuple_GetItem(self, place)); };
        tables.facts.push_back(
            {ampmem::now_ns(),
             address_of(gradient),
             of_self(1),
             of_self(2),
             of_self(3),
             tables.forms.id(gradient),
             -1});
      }
      return Py_BuildValue("");
    }
  } catch (...) {
  }
  return PyObject_CallFunctionObjArgs(PyTuple_GetItem(self, 0), parameter, nullptr);
}

MethodDef gradient_hook{"note_gradient", on_gradient, kOneArgument, nullptr};

}  // namespace

#define AMPMEM_EXPORT extern "C" __attribute__((visibility("default")))

// Forget everything: a new recording begins. These are the types of plain tensors.
AMPMEM_EXPORT void ampmem_tensors_clear(const void* tensor, const void* parameter) {
  tables = Tables();
  tensor_types[0] = tensor;
  tensor_types[1] = parameter;
}

// Log what is known of what modules hold in their dictionaries of two kinds, if all of it is where it was. Each list has
// a weak reference to a module, then a key, in turns.
AMPMEM_EXPORT int64_t ampmem_tensors_of_modules(
    int64_t number, int64_t key, Object* first, Object* first_kind, Object* second, Object* second_kind) {
  return repeat(number, key, same_places, [&] {
    return read_modules(first, first_kind) && read_modules(second, second_kind);
  });
}

// Log what is known of the gradients of the parameters in lists in a list, if gradients of the same parameters are there.
AMPMEM_EXPORT int64_t ampmem_tensors_of_gradients(int64_t number, int64_t key, Object* groups) {
  return repeat(number, key, same_tensors, [&] { return read_gradients(groups); });
}

// Log what is known of an optimizer's state, a dictionary of dictionaries, if the same tensors are in it.
AMPMEM_EXPORT int64_t ampmem_tensors_of_state(int64_t number, int64_t key, Object* states) {
  return repeat(number, key, same_tensors, [&] { return read_state(states); });
}

// Forget what is known under a number.
AMPMEM_EXPORT void ampmem_tensors_forget(int64_t number) {
  tables.known.erase(number);
}

// Keep the facts that Python has logged about the tensors that were read last, if they are one about each, in order.
AMPMEM_EXPORT void ampmem_tensors_keep(int64_t number, int64_t key, const Fact* facts, int64_t count) {
  const auto about = [](const Row& row, const Fact& fact) { return row.address == fact.address; };
  if (std::equal(tables.rows.begin(), tables.rows.end(), facts, facts + count, about)) {
    tables.known[number] = {key, tables.rows, {facts, facts + count}};
  }
}

// A function for Tensor.register_post_accumulate_grad_hook. It calls `otherwise` with a tensor that is not plain.
AMPMEM_EXPORT Object* ampmem_tensors_hook(Object* otherwise, int64_t fact, int64_t name, int64_t module) {
  using Number = long long;
  Object* const self = Py_BuildValue("(OLLL)", otherwise, Number{fact}, Number{name}, Number{module});
  Object* const made = self == nullptr ? nullptr : PyCFunction_NewEx(&gradient_hook, self, nullptr);
  Py_DecRef(self);
  return made;
}

// The number of forms; returns the number of facts.
AMPMEM_EXPORT int64_t ampmem_tensors_count(int64_t* forms) {
  *forms = static_cast<int64_t>(tables.forms.count());
  return static_cast<int64_t>(tables.facts.size());
}

// Move the oldest facts into a table, as far as there is room; returns how many. Other threads may have added some since
// they were counted.
AMPMEM_EXPORT int64_t ampmem_tensors_take(int64_t* to, int64_t room) {
  return ampmem::take(tables.facts, to, room);
}

// As ampmem_ops_form.
AMPMEM_EXPORT const char* ampmem_tensors_form(int64_t index, const int64_t** to, int64_t* count) {
  return tables.forms.read(index, to, count);
}
