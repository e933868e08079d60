"""Hardware counters of one launch, by Nsight Compute: why a kernel takes the time it takes."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

from harness.build import Case

STALLS = (
    "barrier",
    "dispatch_stall",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "mio_throttle",
    "not_selected",
    "selected",
    "short_scoreboard",
    "wait",
)
METRICS = {
    "time, ns": "gpu__time_duration.sum",
    "instructions issued": "smsp__inst_issued.sum",
    "FMA pipe busy, %": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "issue slots busy, %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "resident warps, % of peak": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "shared memory: accesses by loads": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared memory: accesses by stores": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared memory: bank conflicts of loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared memory: bank conflicts of stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "local memory: accesses by loads": "l1tex__t_output_wavefronts_pipe_lsu_mem_local_op_ld.sum",
    "device memory: bytes read": "dram__bytes_read.sum",
} | {
    f"stalled, warps per issue: {name.replace('_', ' ')}": (
        f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
    )
    for name in STALLS
}


class NoProfiler(RuntimeError):
    """Nsight Compute is demanded and missing, or it does not profile here."""


def count(case: Case) -> dict[str, float]:
    """Counters of one launch of a case's kernel, by the names in METRICS.

    The launch is the second of ``python -m harness verify`` on the case, profiled by ncu with the GPU's
    clocks left alone. Raises NoProfiler with ncu's last line.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoProfiler("no ncu (Nsight Compute) on PATH; it comes with the CUDA toolkit")
    problem = case.problem
    profile = [ncu, "--clock-control", "none", "--kernel-name", "main_kernel", "--launch-skip", "1"]
    profile += ["--launch-count", "1", "--csv", "--page", "raw", "--print-units", "base"]
    profile += ["--metrics", ",".join(METRICS.values())]
    profile += [sys.executable, "-m", "harness", "verify", "--on", "gpu", "--step", str(case.step.number)]
    profile += ["--variant", case.variant, "--tile", str(case.tile), "--stages", str(case.stages)]
    profile += ["--shape", problem.shape, "--dtype", problem.dtype, "--layout", problem.layout]
    result = subprocess.run(profile, capture_output=True, text=True)
    table = list(csv.reader(line for line in result.stdout.splitlines() if line.startswith('"')))
    if result.returncode or len(table) < 3:
        lines = (result.stderr + result.stdout).strip().splitlines() or ["no output"]
        raise NoProfiler(f"ncu did not profile {case}: {lines[-1]}")
    values = dict(zip(table[0], table[2]))
    missing = [metric for metric in METRICS.values() if not values.get(metric)]
    if missing:
        raise NoProfiler(f"this ncu has no {', '.join(missing)}; harness/counters.py names the metrics of sm_90")
    counted = {}
    for name, metric in METRICS.items():
        try:
            counted[name] = float(values[metric].replace(",", ""))
        except ValueError as error:
            raise NoProfiler(f"ncu gives {metric} as {values[metric]!r}, which is no number") from error
    return counted
