"""Generated CUDA text run by this machine's own threads: a block's threads with registers, a barrier and cp.async.

TVM's lowering for the CPU runs a block's threads one after another, on the same "registers", so that it cannot show a
thread that stores what it never computed, or one that runs ahead of the others. Here each thread of a block is a
thread, registers and shared memory begin as NaN, the last block runs first, and an asynchronous copy lands as late as
its wait allows, or at once. Only float32 kernels of plain loops, copies and barriers.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

PRELUDE = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>
typedef unsigned char uchar;
struct Index { int x = 0, y = 0, z = 0; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
#define __align__(bytes) __attribute__((aligned(bytes)))
static thread_local Index threadIdx;
static Index blockIdx;
static std::barrier<>* meeting;
static bool at_once;
alignas(64) uchar buf_dyn_shmem_ptr[256 << 10];
inline void __syncthreads() { meeting->arrive_and_wait(); }
struct Copy { uchar *to; const uchar *from; int bytes; bool inside; };
static thread_local std::vector<Copy> open_group;
static thread_local std::deque<std::vector<Copy>> groups;
inline void land(const Copy& c) { c.inside ? memcpy(c.to, c.from, c.bytes) : memset(c.to, 0, c.bytes); }
inline void copy(void* to, int to_offset, const void* from, int from_offset, int bytes, bool inside) {
  Copy c{(uchar*)to + 4 * to_offset, (const uchar*)from + 4 * from_offset, bytes, inside};
  if (at_once) land(c); else open_group.push_back(c);
}
inline void commit() { groups.push_back(open_group); open_group.clear(); }
inline void wait(size_t left) {
  for (; groups.size() > left; groups.pop_front()) for (auto& c : groups.front()) land(c);
}
inline float pipeline_read_float32(const float* address) { return *address; }
inline void pipeline_arrived() {}
inline void tvm_builtin_ptx_cp_async_commit_group_async_commit_group() { commit(); }
"""

LAUNCH = """
extern "C" void launch(float** arguments, int blocks, int columns, int rows, int immediately) {
  at_once = immediately;
  for (blockIdx.x = blocks - 1; blockIdx.x >= 0; --blockIdx.x) {
    std::fill_n((float*)buf_dyn_shmem_ptr, sizeof(buf_dyn_shmem_ptr) / 4, NAN);
    std::barrier<> here(columns * rows);
    meeting = &here;
    std::vector<std::thread> threads;
    for (int i = 0; i < columns * rows; ++i)
      threads.emplace_back([=] { threadIdx.x = i % columns; threadIdx.y = i / columns; main_kernel(ARGUMENTS); });
    for (auto& thread : threads) thread.join();
  }
}
"""


class ThreadedKernel:
    """A kernel's CUDA text as a function of this machine; ``launch`` are the extents of blockIdx and threadIdx."""

    def __init__(self, text: str, launch: dict[str, int]) -> None:
        if shutil.which("g++") is None:
            pytest.skip("no g++, which compiles generated CUDA for the CPU")
        body = text[text.rfind('extern "C"') :]
        self.launch = launch
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(_host_text(body))
            command = ["g++", "-std=c++20", "-O0", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
            subprocess.run([*command, str(source), "-o", str(library)], check=True)
            self.library = ctypes.CDLL(str(library))

    def __call__(self, *inputs: np.ndarray, shape: tuple[int, ...], at_once: bool = False) -> np.ndarray:
        """Run into an output full of NaN; copies land at once, or as late as their waits allow."""
        arrays = [*map(np.ascontiguousarray, inputs), np.full(shape, np.nan, np.float32)]
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        extents = (self.launch.get(axis, 1) for axis in ("blockIdx.x", "threadIdx.x", "threadIdx.y"))
        self.library.launch(pointers, *extents, int(at_once))
        return arrays[-1]


def _host_text(body: str) -> str:
    count = len(re.findall(r"__restrict__", body[: body.index("{")]))
    body = re.sub(r"__launch_bounds__\(\d+\)|__global__", "", body)
    body = re.sub(r"extern __shared__", "extern", body)
    once = "if (!threadIdx.x && !threadIdx.y)"
    shared = rf"alignas(64) static float \1[\2]; {once} std::fill_n(\1, \2, NAN); __syncthreads();"
    body = re.sub(r"__shared__ alignas\(64\) float (\w+)\[(\d+)\];", shared, body)
    registers = r"\1float \2[\3]; std::fill_n(\2, \3, NAN);"
    body = re.sub(r"^(\s*)alignas\(64\) float (\w+)\[(\d+)\];", registers, body, flags=re.M)
    helpers = [
        f"inline void {name}(void* to, int i, void* from, int j{', int inside' if masked else ''})"
        f" {{ copy(to, i, from, j, {size}, {'inside' if masked else 'true'}); }}"
        for name, masked, size in sorted(set(re.findall(r"(ptx_cp_async_legacy(_pred)?_c[ag]_(\d+)_4_4)", body)))
    ]
    helpers += [
        f"inline void {name}() {{ wait({left}); }}"
        for name, left in sorted(set(re.findall(r"(tvm_builtin_ptx_cp_async_wait_group_async_wait_group_(\d+))", body)))
    ]
    launch = LAUNCH.replace("ARGUMENTS", ", ".join(f"arguments[{i}]" for i in range(count)))
    return "\n".join([PRELUDE, *helpers, body, launch])
