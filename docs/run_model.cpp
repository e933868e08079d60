// Loads a library that export_library wrote and runs its "main" on one input of float32, on the CPU or a GPU:
//
//   run_model ./model.so cpu|cuda 2 64        prints the first numbers of the output for an input of ones, 2 x 64
//
// Needs TVM's runtime alone: docs/relax.md says how it is compiled.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

using namespace tvm::ffi;

int main(int count, char** words) {
  if (count < 4) {
    std::fprintf(stderr, "run_model LIBRARY cpu|cuda EXTENT...\n");
    return 2;
  }
  const bool on_gpu = std::strcmp(words[2], "cuda") == 0;
  const DLDevice host{kDLCPU, 0}, device{on_gpu ? kDLCUDA : kDLCPU, 0};
  const DLDataType dtype{kDLFloat, 32, 1};
  std::vector<int64_t> shape;
  for (int i = 3; i < count; ++i) shape.push_back(std::atoll(words[i]));

  Module machine = Module::LoadFromFile(words[1])->GetFunction("vm_load_executable").value()().cast<Module>();
  Function begin = machine->GetFunction("vm_initialization").value();
  const int pooled = 2;  // each device with its kind of allocator; on the host shapes are computed
  on_gpu ? begin(int(kDLCUDA), 0, pooled, int(kDLCPU), 0, pooled) : begin(int(kDLCPU), 0, pooled);

  Function allocate = Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope");
  Function copy = Function::GetGlobalRequired("runtime.TVMTensorCopyFromTo");
  Tensor ones = allocate(Shape(shape), dtype, host, nullptr).cast<Tensor>();
  for (int64_t i = 0; i < ones.numel(); ++i) static_cast<float*>(ones.data_ptr())[i] = 1;
  Tensor input = allocate(Shape(shape), dtype, device, nullptr).cast<Tensor>();
  copy(ones, input);
  Tensor output = machine->GetFunction("main").value()(input).cast<Tensor>();
  Tensor shown = allocate(Shape(output.shape()), output.dtype(), host, nullptr).cast<Tensor>();
  copy(output, shown);
  for (int64_t i = 0; i < shown.numel() && i < 4; ++i) std::printf("%g\n", static_cast<float*>(shown.data_ptr())[i]);
}
