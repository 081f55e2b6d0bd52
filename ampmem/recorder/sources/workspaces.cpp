// The workspaces of cuBLAS: blocks that torch keeps for each handle and stream, and that no tensor has.
//
// Private parts of torch: the maps of ATen/cuda/CUDAContextLight.h, whose values differ from version to version. This
// file is compiled only for a CUDA build of torch, where CUDA's headers are. Those of cuBLAS and the like need not be
// there: only their handles are named, and extension.py puts empty headers in their place.

using cublasHandle_t = void*;
using cublasLtHandle_t = void*;
using cusolverDnHandle_t = void*;
using cusparseHandle_t = void*;

#include <ATen/cuda/CUDAContextLight.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace {

const void* start_of(const at::DataPtr& block) {
  return block.get();
}

const void* start_of(const std::pair<at::DataPtr, size_t>& block) {
  return block.first.get();
}

}  // namespace

// Write the addresses of the workspaces, of all devices, as far as there is room; returns how many there are.
extern "C" __attribute__((visibility("default"))) int64_t ampmem_workspaces(int64_t* to, int64_t room) {
  std::vector<int64_t> found;
  using namespace at::cuda;
  for (auto* each : {&cublas_handle_stream_to_workspace(), &cublaslt_handle_stream_to_workspace()}) {
    const std::shared_lock lock(each->mutex);
    for (const auto& [_, block] : each->map) {
      found.push_back(reinterpret_cast<int64_t>(start_of(block)));
    }
  }
  std::copy_n(found.begin(), std::min<size_t>(found.size(), room), to);
  return static_cast<int64_t>(found.size());
}
