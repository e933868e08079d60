"""Count what the hardware does in one launch, by Nsight Compute: why a kernel takes the time it takes."""

from __future__ import annotations

import csv
import functools
import shutil
import subprocess
import sys

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.models.time import instruction_ceiling

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    *("barrier", "dispatch_stall", "lg_throttle", "long_scoreboard", "math_pipe_throttle", "mio_throttle"),
    *("not_selected", "selected", "short_scoreboard", "wait"),
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
} | {f"stalled, warps per issue: {name.replace('_', ' ')}": STALL.format(name) for name in STALLS}
# Asked for where ncu lists them: what tensor cores and their loads do, and reasons to wait that not every GPU has.
# Of sm_90 in ncu 2025; other releases and GPUs name some of them otherwise.
MORE_STALLS = ("branch_resolving", "drain", "gmma", "imc_miss", "membar", "no_instruction", "sleeping", "tex_throttle")
MORE_METRICS = {
    "tensor pipe busy, %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor pipe: warps' instructions (hmma)": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "tensor pipe: warps' instructions (gmma)": "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "shared memory: pipe busy, %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "shared memory: accesses by ldmatrix": "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum",
    "shared memory: bank conflicts of ldmatrix": "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
    "shared memory: bank conflicts of cp.async": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts.sum",
    "L2: hit rate, %": "lts__t_sector_hit_rate.pct",
    "L2: busy, %": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "device memory: busy, %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
} | {f"stalled, warps per issue: {name.replace('_', ' ')}": STALL.format(name) for name in MORE_STALLS}
CEILING = "its instruction's ceiling, GFLOPS"


class NoProfiler(RuntimeError):
    """Nsight Compute is demanded and missing, or it does not profile here."""


def profiler() -> str:
    """Find ncu; NoProfiler where it is not on PATH."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoProfiler("no ncu (Nsight Compute) on PATH; it comes with the CUDA toolkit")
    return ncu


@functools.cache
def offered_metrics(ncu: str) -> dict[str, str]:
    """Ask which of MORE_METRICS this ncu lists for the GPU at hand, once. NoProfiler with ncu's last line."""
    result = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    known = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    if result.returncode or not known:
        lines = (result.stderr + result.stdout).strip().splitlines() or ["no output"]
        raise NoProfiler(f"ncu --query-metrics lists nothing: {lines[-1]}")
    return {name: metric for name, metric in MORE_METRICS.items() if metric.split(".")[0] in known}


def ceiling(case: Case) -> dict[str, float]:
    """Look up what the case's instruction alone reaches on this GPU, under CEILING; empty where it was not measured."""
    rates = case.machine.rates
    found = rates and instruction_ceiling(rates, type(case.tile), case.math)
    return {CEILING: found} if found else {}


def count(case: Case) -> dict[str, float]:
    """Count one launch of a case's kernel, by the names in METRICS and MORE_METRICS.

    The launch is the second of ``ladder verify`` on the case, profiled by ncu with the GPU's
    clocks left alone. Of MORE_METRICS, those are left out that ncu does not list, or gives no number
    for. Raises NoProfiler with ncu's last line.
    """
    ncu = profiler()
    offered = offered_metrics(ncu)
    asked = [*METRICS.values(), *offered.values()]
    result = subprocess.run(_profile(ncu, case, asked), capture_output=True, text=True)
    table = list(csv.reader(line for line in result.stdout.splitlines() if line.startswith('"')))
    if result.returncode or len(table) < 3:
        lines = (result.stderr + result.stdout).strip().splitlines() or ["no output"]
        raise NoProfiler(f"ncu did not profile {case}: {lines[-1]}")
    values = dict(zip(table[0], table[2]))
    missing = [metric for metric in METRICS.values() if not values.get(metric)]
    if missing:
        raise NoProfiler(f"this ncu has no {', '.join(missing)}; harness/counters.py names the metrics of sm_90")
    counted = {name: _number(metric, values[metric]) for name, metric in METRICS.items()}
    for name, metric in offered.items():
        try:
            counted[name] = _number(metric, values.get(metric, ""))
        except NoProfiler as nothing:  # listed, and not counted on this GPU or for this kernel
            print(f"left out: {nothing}", file=sys.stderr)
    return counted


def _profile(ncu: str, case: Case, metrics: list[str]) -> list[str]:
    problem = case.problem
    command = [ncu, "--clock-control", "none", "--kernel-name", "main_kernel", "--launch-skip", "1"]
    command += ["--launch-count", "1", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "tensorir_ladder.harness", "verify", "--on", "gpu"]
    command += ["--step", str(case.step.number)]
    command += ["--variant", case.variant, "--tile", str(case.tile), "--stages", str(case.stages)]
    return [*command, "--shape", problem.shape, "--dtype", problem.dtype, "--layout", problem.layout]


def _number(metric: str, text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError as error:
        raise NoProfiler(f"ncu gives {metric} as {text!r}, which is no number") from error
