"""Traces of what the hardware does with layouts, recorded once on a GPU, which the emulator is held to.

The emulator's layouts (fragments, swizzles, descriptors, boxes) are read from the same manual as the schedules' own. So
that both cannot share one misunderstanding, small kernels whose every element tells its place (:mod:`.warp`,
:mod:`.warpgroup`, :mod:`.transfers`) ran on an H200, and what came out is in ``recorded/``, a file for each. Tests run
the same CUDA text in the emulator and compare every value; ``ladder traces`` records.
"""

from tensorir_ladder.lab.traces.probe import Probe
from tensorir_ladder.lab.traces.recording import (
    RECORDED,
    Trace,
    TraceError,
    difference,
    probes,
    read_trace,
    record,
)
