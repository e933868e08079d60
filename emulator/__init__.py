"""Generated CUDA, executed and attacked on the CPU: no GPU, no CUDA toolkit, only a C++ compiler on PATH.

CUDA text and launches go in, arrays and faults come out; nothing here knows a step or the harness::

    from tensorir_ladder.emulator import EmulatedProgram, LaunchPlan, PlainBuffer
    launch = LaunchPlan("scale", (PlainBuffer("A"), PlainBuffer("B")), grid=(4, 1, 1), block=(32, 1, 1))
    program = EmulatedProgram("scale", cuda, (launch,), names=("A", "B"), operands=("A",))  # TVM's text
    program(a, b, seed=0)  # numpy arrays, written back; KernelFault names the line of CUDA text at fault
    # Of what TVM lowered: launches = kernels.codegen.host_code.read_launches(generated.host)

The text is compiled for the host (:mod:`.source`, :mod:`.ptx`, :mod:`.compiler`) and linked with a runtime, in which a
block's threads are fibers; :mod:`.execution` launches it. The runtime is in ``device/``: threads and blocks
(``machine.h``, ``fibers.h``, ``runtime.cpp``), what they do together (``barriers.h``, ``warps.h``), ``mbarrier.h``,
``tma.h``, ``cp_async.h``, ``tensor_cores.h``, memories and who accessed them (``shared_memory.h``,
``global_memory.h``, ``races.h``), and what a kernel's own text calls (``kernel.h``, ``types.h``, ``functions.h``).

What it models
- Threads, warps, blocks, clusters. A seed draws who goes on at each barrier, and now and then in between: whole warps
  run ahead as far as barriers let them. Lanes of a warp meet only at instructions that say so.
- ``__syncthreads``, named barriers, ``__syncwarp``, shuffles, votes, elect (a lane that the seed chooses), cluster
  barriers; mbarriers with phases, arrivals and bytes, also another block's.
- Blocks (clusters) that wait for others: one runs until it ends or stands at a flag in global memory, then others begin
  or go on, as many alive together as the machine has multiprocessors. Flags are words of global memory that ld.acquire,
  ld.relaxed, st.release, st.relaxed and red.add with gpu or sys scope reach.
- cp.async and its groups, wgmma and its groups, TMA loads (boxes, swizzles, zeros outside, multicast; bulk loads of
  bytes in a row) and stores (clipped). Each is done at once, as late as its wait allows (TMA: when nothing else can go
  on), or at a drawn time, by ``seed % 3``; wgmma then reads its operands that late, too.
- setmaxnreg: a thread's registers at launch, as ptxas takes them from launch bounds, and the block's pool, which has
  what warps gave back; a warp waits for what is not there.
- Float32 as nvcc compiles it with ``--use_fast_math`` (TVM's default) or without: flushed subnormals, and division,
  exp, log, pow, sin, cos, tan and tanh with a GPU's domains and errors (:mod:`.functions`; docs/method.md).
- ldmatrix, stmatrix, mma.sync, wgmma with descriptors or with its first operand in registers, in the layouts of the PTX
  ISA; TF32 as the hardware cuts it.

What it reports
- ``race``: bytes of shared memory, both accesses and their lines, where nothing orders them: a vector clock for each
  thread and for all that runs beside it. It needs no unlucky order: any order of threads that reaches both will do.
  The same in the global memory that a function's kernels keep for each other (workspaces, sums and flags behind C),
  between all blocks of a launch: by ordinary loads and stores, flags, bulk loads; a release that is acquired orders.
- ``missing proxy fence``: wgmma, a bulk store or a bulk load reads what ordinary writes left, and there is no
  ``fence.proxy.async`` between, by whom ever; ``unawaited``: what is still under way when its thread ends.
- ``missing wgmma.fence``: a register of wgmma, a sum or one of its first operand, was written since the last one;
  ``register in flight``: a sum that it still adds to is used, or a register that it still reads is written.
- ``operand written``: any store to an array that is only read; ``stored twice``: an element of an output that two
  threads of a launch store, in whatever order, by ordinary stores, TMA or PTX. Additions (red, reducing bulk stores)
  may be many threads', but not beside a store.
- ``out of bounds`` and ``misaligned`` accesses to global and shared memory; ``deadlock``, with who waits where on what;
  ``flag left raised`` after the call; ``divergence``; misused ``barrier``, ``mbarrier``, ``cluster``, ``TMA``,
  ``wgmma`` and ``setmaxnreg``.
- ``barrier`` also where nothing orders a thread's arrival behind the round before, for which it might have been taken.
- ``missing griddepcontrol.wait`` before global memory is used, where a kernel may begin before the one before it ends.
- Registers and shared memory begin as NaN, which reaches the output where it is used.

What it does not
- An output's reads are not watched: a thread may read what another stores beside it. Nor is what cp.async and TMA loads
  by tensor maps read of workspaces. A new launch begins with clean memories of who did what. A flag that is awaited by
  ordinary loads is waited for without end. Of atomics there is red.add on 32 bits and no other.
- Shared memory is watched in units of two bytes. An access that the compiler removes, or merges with another, is not
  seen; an overrun is seen only where it leaves the array's memory (gaps lie between static and between global arrays,
  none inside dynamic shared memory).
- Of the memory model: what orders orders completely; scopes and the kinds of fences beside the proxy's are not told
  apart, and a proxy fence is asked for only where the asynchronous proxy reads what ordinary stores wrote, not where it
  writes over what ordinary loads have read. Whether the CUDA compiler keeps wgmma's registers where they are is not
  its business either.
- Sums are made in float32, one product after another, and a product is rounded before it is added: results differ from
  a GPU's in their last bits. Speed says nothing.

A clean run says that for this shape and these seeds, indices, layouts, waits and barriers are right as far as the above
goes. It does not prove other shapes. The layouts themselves (fragments, descriptors, swizzles, boxes and what is beyond
a tensor's edges) are held to traces of an H200, value by value (:mod:`lab.traces`).
"""

from tensorir_ladder.emulator.compiler import find_host_compiler
from tensorir_ladder.emulator.errors import (
    EmulatorError,
    KernelFault,
    NoHostCompiler,
    UnknownInstruction,
    UnknownLaunch,
    UnknownText,
    WrongArray,
)
from tensorir_ladder.emulator.execution import Deeds, EmulatedProgram
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, PlainBuffer, TensorMap

__all__ = [
    "Deeds",
    "EmulatedProgram",
    "EmulatorError",
    "KernelFault",
    "LaunchPlan",
    "NoHostCompiler",
    "PlainBuffer",
    "TensorMap",
    "UnknownInstruction",
    "UnknownLaunch",
    "UnknownText",
    "WrongArray",
    "find_host_compiler",
]
