"""Check and time a PyTorch model as it comes: by the pipeline, torch, torch.compile and TVM's own rules, interleaved.

GPU time is that of the model's kernels with their launches queued behind a kernel that waits, so that the host's part
is hidden. Where a call synchronizes, or has more launches than the queue holds, it is the sum of its kernels' times in
a profile, without the gaps between them. Wall time is from the call until the GPU is done. The model's
weights and inputs lie where calls before left them: a model that fits the L2 finds it warm, as in use.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.target import Target

from tensorir_ladder.harness.environment import gpu_state
from tensorir_ladder.harness.execution import gpu_arch
from tensorir_ladder.harness.peers.entrant import reason, say
from tensorir_ladder.harness.race import Rounds
from tensorir_ladder.harness.records import (
    FIRST,
    FunctionTimed,
    Method,
    ModelRecord,
    Peer,
    RulesTimed,
    Timing,
    Verification,
)
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.harness.whole_models.torch_models import Made
from tensorir_ladder.relax import from_torch
from tensorir_ladder.relax.compilation import CompiledModule, link
from tensorir_ladder.relax.pipelines import pipeline
from tensorir_ladder.relax.rules.rule import BY

OURS, STOCK, DLIGHT = "ladder", "stock", "dlight-sm90"
EAGER, COMPILED, TUNED = "torch", "torch.compile", "torch.compile, max-autotune-no-cudagraphs"
SDPA = {  # of torch with one backend of its attention, where it takes a model's
    f"torch, {backend.lower().replace('_', ' ')}": backend
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
}
WALL = ", wall"  # behind a contender's name: the time that its caller waits
FACTOR = 2  # of the errors that torch makes in the model's dtype, both against float32
ROUNDS, CALLS, WARMUPS = 20, 5, 3
SPIN_HZ, LONGEST_SPIN, ATTEMPTS = 1.98e9, 0.4, 4  # clocks a second; seconds
OF_KERNEL = re.compile(r"(_kernel)?(_\d+)?$")  # what TVM puts behind a function's name for its kernels


@dataclass
class Contestant:
    """A form of a model: how it is called, how long it took to make, what is known of its functions."""

    name: str
    call: Callable[[], Any] | None
    build_s: float = 0.0
    why: str = ""  # there is none
    rules: dict[str, str] = field(default_factory=dict)  # of functions
    errors: tuple[float, float] | None = None


def contestants(made: Made, beside: Sequence[str]) -> list[Contestant]:
    """Make a model's forms on the GPU; what cannot be made says why."""
    module = made.module.cuda()
    inputs = [each.cuda() for each in made.inputs]
    target = Target({"kind": "cuda", "arch": gpu_arch()})
    imported = from_torch(module, inputs)
    found = [_of_torch(EAGER, lambda: module, inputs)]
    if COMPILED in beside:
        found.append(_of_torch(COMPILED, lambda: torch.compile(module), inputs))
    if TUNED in beside:
        found.append(_of_torch(TUNED, lambda: torch.compile(module, mode="max-autotune-no-cudagraphs"), inputs))
    found += [_of_torch(name, lambda: module, inputs, backend) for name, backend in SDPA.items() if name in beside]
    rules: dict[str, str] = {}

    def ours() -> relax.VMExecutable:
        scheduled = pipeline(target, prepare=True)(imported[0])
        rules.update(
            {name.name_hint: str((each.attrs or {}).get(BY, "")) for name, each in scheduled.functions_items()}
        )
        return link(scheduled, target, cuda_graphs=True)

    found.append(_of_tvm(OURS, ours, imported[1], inputs))
    found[-1].rules = rules
    if STOCK in beside:
        found.append(_of_tvm(STOCK, lambda: tvm.compile(imported[0], target), imported[1], inputs))
    if DLIGHT in beside:
        plain = Target({"kind": "cuda", "arch": gpu_arch().rstrip("af")})
        found.append(_of_tvm(DLIGHT, lambda: tvm.compile(imported[0], plain), imported[1], inputs))
    return found


def _made(name: str, make: Callable[[], Callable[[], Any]]) -> Contestant:
    """Make a form and call it once, timed."""
    begun = time.monotonic()
    try:
        with torch.no_grad():
            call = make()
            call()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - another project's code may raise anything; the record keeps it
        say(f"{name}: failed: {reason(error)}")
        return Contestant(name, None, time.monotonic() - begun, reason(error))
    return Contestant(name, call, time.monotonic() - begun)


def _of_torch(name: str, form: Callable[[], Any], inputs: Sequence[torch.Tensor], attention: str = "") -> Contestant:
    def make() -> Callable[[], Any]:
        module = form()
        if not attention:
            return lambda: module(*inputs)
        backend = getattr(torch.nn.attention.SDPBackend, attention)

        def call() -> Any:
            with torch.nn.attention.sdpa_kernel(backend):
                return module(*inputs)

        return call

    return _made(name, make)


def _of_tvm(
    name: str, make_executable: Callable[[], relax.VMExecutable], weights: Sequence[Any], inputs: Sequence[torch.Tensor]
) -> Contestant:
    def make() -> Callable[[], Any]:
        module = CompiledModule(make_executable(), weights, inputs[0].device.index)
        return lambda: module(*inputs)

    return _made(name, make)


def check(found: Sequence[Contestant], made: Made) -> None:
    """Hold each form's output to twice torch's error; what is beyond has no call any more.

    The reference is torch's in float32, of a float32 model in float64. WrongResult where torch does not run it.
    """
    import copy

    dtype = dtype_of(made)
    more = torch.float64 if dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(made.module).to(more)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        wide = [each.cuda().to(more) if each.is_floating_point() else each.cuda() for each in made.inputs]
        reference = exact(*wide).double()
        del exact, wide
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
        if found[0].call is None:
            raise WrongResult(f"torch itself does not run it: {found[0].why}")
        allowed = None
        for each in found:
            if each.call is None:
                continue
            off = each.call().double() - reference
            each.errors = (
                float(off.norm() / reference.norm()),
                float(off.abs().max() / reference.abs().max()),
            )
            least = FACTOR * torch.finfo(dtype).eps
            allowed = allowed or tuple(max(FACTOR * error, least) for error in each.errors)  # torch is the first
            if not all(own <= most for own, most in zip(each.errors, allowed)):
                each.call, each.why = None, f"wrong: errors {each.errors}, allowed {allowed}"
                say(f"{each.name}: {each.why}")
    torch.cuda.empty_cache()


def dtype_of(made: Made) -> torch.dtype:
    """Return the dtype of a model's first weights, float32 where it has none."""
    return next((each.dtype for each in made.module.parameters() if each.is_floating_point()), torch.float32)


def race(found: Sequence[Contestant], rounds: int = ROUNDS) -> dict[str, tuple[Timing, Timing]]:
    """Time those that run in interleaved rounds: GPU time and wall time of each, by name."""
    able = [each for each in found if each.call is not None]
    gpu: dict[str, list[float]] = {each.name: [] for each in able}
    wall: dict[str, list[float]] = {each.name: [] for each in able}
    profiled: set[str] = set()
    with torch.no_grad():
        hosts = {each.name: _host_seconds(each.call) for each in able}
        for number in range(rounds):
            for each in able if number % 2 else able[::-1]:
                each.call()
                torch.cuda.synchronize()
                begun = time.perf_counter()
                each.call()
                torch.cuda.synchronize()
                wall[each.name].append((time.perf_counter() - begun) * 1e3)
                queued = None if each.name in profiled else _queued_ms(each.call, hosts[each.name])
                if queued is None:
                    profiled.add(each.name)
                gpu[each.name].append(_profiled_ms(each.call) if queued is None else queued)
    return {name: (Timing(name, tuple(gpu[name])), Timing(name + WALL, tuple(wall[name]))) for name in gpu}


def _host_seconds(call: Callable[[], Any]) -> float:
    """Return what a call takes on the host until it returns."""
    for _ in range(WARMUPS):
        call()
    taken = []
    for _ in range(WARMUPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return statistics.median(taken)


def _queued_ms(call: Callable[[], Any], host_s: float) -> float | None:
    """Return the GPU's time for a call whose launches were all queued before the first ran; None where they cannot be.

    The kernel in front waits longer until they were, or until that is ATTEMPTS times so.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for attempt in range(ATTEMPTS):
        torch.cuda._sleep(int(min(2 ** (attempt + 1) * host_s + 1e-3, LONGEST_SPIN) * SPIN_HZ))
        begin.record()
        call()
        queued = not begin.query()
        end.record()
        torch.cuda.synchronize()
        if queued:
            return begin.elapsed_time(end)
    return None


def _profiled_ms(call: Callable[[], Any]) -> float:
    """Return the sum of the times of a call's kernels."""
    return sum(milliseconds for _, milliseconds in _kernels_of(call, 1))


def _kernels_of(call: Callable[[], Any], calls: int) -> list[tuple[str, float]]:
    """List the kernels of some calls by name, each with its milliseconds, from a profile."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.device_time / 1e3) for event in on_gpu if event.device_time > 0]


def functions_of(ours: Contestant) -> tuple[FunctionTimed, ...]:
    """Return each function's calls and the mean time of one, from a profile of some calls."""
    times: dict[str, list[float]] = {}
    for kernel, milliseconds in _kernels_of(ours.call, CALLS):
        times.setdefault(OF_KERNEL.sub("", kernel), []).append(milliseconds)
    found = []
    for name, own in times.items():
        rule = ours.rules.get(name) or name.partition("_")[0]  # explicit kernels are named by what they are
        calls = max(1, round(len(own) / CALLS))
        found.append(
            FunctionTimed(name[:200], rule, "attention" in name, calls, Timing(name[:200], (statistics.mean(own),)))
        )
    return tuple(sorted(found, key=lambda each: -each.share_ms))


def measure(session: Session, name: str, made: Made, beside: Sequence[str]) -> ModelRecord:
    """Make, check and time a model's forms."""
    found = contestants(made, beside)
    check(found, made)
    return timed(session, name, made, found)


def timed(session: Session, name: str, made: Made, found: Sequence[Contestant]) -> ModelRecord:
    """Time a model's forms that are made and checked."""
    before = gpu_state()
    times = race(found)
    after = gpu_state()
    shape = tuple(made.inputs[0].shape)
    weights = sum(each.numel() * each.element_size() for each in made.module.parameters())
    method = Method(
        rounds=ROUNDS,
        launches_per_round=1,
        operand_sets=1,
        data="as the model's function makes weights and inputs",
        cache="as the call before left it",
        launch="queued behind a kernel that waits, device events around it; else a profile's sum of kernels",
        warmup_ms=0.0,
    )
    rounds = Rounds(tuple(pair[0] for pair in times.values()), method, before, after)
    by_rules = [each for each in found if each.name in (OURS, STOCK, DLIGHT)]
    beside = [each for each in found if each not in by_rules]
    allowed = FACTOR * beside[0].errors[0] if beside[0].errors else 0.0
    peers = [_peer(each, times) for each in beside]
    walls = [Peer(label + WALL, "measured", "", "", pair[1]) for label, pair in times.items()]
    return ModelRecord(
        model=name,
        extent=FIRST,
        value=int(shape[0]),
        symbolic=False,
        dtype=str(dtype_of(made)).removeprefix("torch."),
        shape=shape,
        bytes_moved=max(1, weights),
        flops=0,
        rules=tuple(_rules(each, times, allowed) for each in by_rules),
        beside=(*peers, *walls),
        method=method,
        environment=session.environment(rounds),
        command=session.command,
    )


def _peer(each: Contestant, times: dict[str, tuple[Timing, Timing]]) -> Peer:
    return Peer(
        each.name, "measured" if each.call else "failed", each.why[:300], "", times[each.name][0] if each.call else None
    )


def _rules(each: Contestant, times: dict[str, tuple[Timing, Timing]], allowed: float) -> RulesTimed:
    right = each.call is not None
    return RulesTimed(
        name=each.name,
        arch=gpu_arch(),
        status="measured" if right else "wrong" if each.errors else "failed",
        why=each.why[:300],
        sums="float32",
        build_s=round(each.build_s, 2),
        source_sha256="",
        verification=Verification(True, "gpu", (0,), each.errors[0], allowed, integers_exact=False) if right else None,
        timing=times[each.name][0] if right else None,
        rest=None,
        functions=functions_of(each) if right and each.name == OURS else (),
    )


def summary(record: ModelRecord) -> str:
    """Say a model's ratios in a line."""
    own = record.times(OURS)
    if own is None:
        return f"{record.model}: {record.of_rules(OURS).why}"
    said = [f"{record.model} {record.shape}: {own.median_ms:.4f} ms"]
    for peer in record.beside:
        if peer.timing is not None and not peer.name.endswith(WALL):
            said.append(f"{peer.timing.median_ms / own.median_ms:.3f} of {peer.name}")
    walls = {peer.name: peer.timing.median_ms for peer in record.beside if peer.name.endswith(WALL) and peer.timing}
    said.append("wall " + ", ".join(f"{name.removesuffix(WALL)} {value:.3f}" for name, value in walls.items()))
    checked = record.of_rules(OURS).verification
    said.append(f"error {checked.max_error:.2g}, allowed {checked.tolerance:.2g}" if checked else "")
    return "; ".join(said) if math.isfinite(own.median_ms) else said[0]
