// What ops.cpp and tensors.cpp read of plain tensors.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace ampmem {

struct Sequence {
  size_t operator()(const std::vector<int64_t>& values) const {
    uint64_t hash = values.size();
    for (const int64_t value : values) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ULL;
      hash ^= hash >> 32;
    }
    return hash;
  }
};
using Ids = std::unordered_map<std::vector<int64_t>, int64_t, Sequence>;

// Whether tensors with these keys are plain: strided, on a CPU or a CUDA device, and no subclass.
inline bool is_plain(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  static const DispatchKeySet plain = DispatchKeySet({DispatchKey::ADInplaceOrView}) |
      DispatchKeySet({DispatchKey::Dense, DispatchKey::AutogradFunctionality}) |
      DispatchKeySet({DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}) |
      DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA});
  return (keys.raw_repr() & ~plain.raw_repr()) == 0;
}

inline bool is_plain(const at::Tensor& tensor) {
  return is_plain(tensor.key_set());
}

inline int64_t address_of(const at::Tensor& tensor) {
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  return storage ? reinterpret_cast<int64_t>(storage.data()) : 0;
}

inline int64_t start_of(const at::Tensor& tensor) {
  return address_of(tensor) == 0 ? 0 : reinterpret_cast<int64_t>(tensor.const_data_ptr());
}

// The forms of tensors, dtype and sizes, each with an id; 0 is that of no tensor.
class Forms {
 public:
  int64_t id(const at::Tensor& tensor) {
    looked_up_.assign(1, static_cast<int64_t>(tensor.scalar_type()));
    looked_up_.insert(looked_up_.end(), tensor.sizes().begin(), tensor.sizes().end());
    const auto found = ids_.find(looked_up_);
    if (found != ids_.end()) {
      return found->second;
    }
    forms_.push_back(looked_up_);
    return ids_.emplace(looked_up_, static_cast<int64_t>(ids_.size())).first->second;
  }

  size_t count() const {
    return forms_.size();
  }

  // The dtype of a form; its sizes go to `to`, their number to `count`.
  const char* read(int64_t id, const int64_t** to, int64_t* count) const {
    const auto& form = forms_[static_cast<size_t>(id)];
    *to = form.data() + 1;
    *count = static_cast<int64_t>(form.size()) - 1;
    return c10::getDtypeNames(static_cast<c10::ScalarType>(form[0])).first.data();
  }

 private:
  std::vector<std::vector<int64_t>> forms_{{}};
  Ids ids_{{{}, 0}};
  std::vector<int64_t> looked_up_;
};

}  // namespace ampmem
