"""Tables of whole models, PyTorch's and our own, and of layers: our rules beside stock TVM, dlight and torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from tensorir_ladder.harness.records import ModelRecord, RulesTimed
from tensorir_ladder.reports.cases import grouped
from tensorir_ladder.reports.cells import NOT_MEASURED, Table, bold_ratio, interval_text
from tensorir_ladder.reports.templating import Markdown

OURS, STOCK, DLIGHT = "ladder", "stock", "dlight-sm90"
TORCH, TURNED, COMPILED, REST, COPY = "torch", "torch, turned", "torch.compile", "torch, rest", "copy"
LINEAR, CONVOLUTION, FUNCTION = "linear-", "conv-", "function-"
WALL = ", wall"  # behind a contender's name: the time that its caller waits
ATTENTION = "attention_"
BACKENDS = tuple(f"torch, {backend} attention" for backend in ("flash", "cudnn", "efficient"))
LEAST_SHARE = 0.03  # of a model's run that a kernel has to be listed
ABOUT = 1.05  # times as many bytes are about as many
MODELS_NOTE = Markdown(
    "float16, one build for all sizes where the extent is symbolic (not ResNet's). Speed of "
    '`relax.get_pipeline("tensorir_ladder")` over that of the others in the same rounds, each a CUDA graph: the median '
    "of the rounds' ratios; small, its 95 % interval (sign test); **bold** where all of it is above 1. Stock: "
    "`tvm.compile` for the target as detected; dlight: for sm_90. Without attention: all but QKᵀ, softmax and PV, "
    "beside torch's model without its attention. Outputs are checked element by element."
)
TORCHS_NOTE = Markdown(
    "PyTorch models in float16, with random weights, as `ladder model --torch NAME` makes them. GPU time, ratio to "
    "that of torch (eager) and of `torch.compile` in the same rounds; small, its 95 % interval; **bold** where all of "
    "it is above 1. Wall: what a caller waits for one call. Outputs are within twice the error that torch makes."
)
ATTENTION_NOTE = Markdown(
    "`scaled_dot_product_attention` by itself, 16 heads, some 4096 tokens in all, causal where grouped (4 heads of "
    "keys and values), padded by a mask of bools: ratio to the fastest of torch's backends (flash, cuDNN, "
    "memory-efficient)."
)
LAYERS_NOTE = Markdown(
    "One layer by itself, one build for any number of rows: ratio to cuBLAS (the faster layout of its weight), "
    "its interval, and below it the ratio to dlight (sm_90). Copy: bytes per second at one row over those of a "
    "copy of about as many."
)
Ratio = tuple[float, tuple[float, float]]


def model_tables(records: Sequence[ModelRecord]) -> list[Table]:
    """Make, for each GPU, tables of its models, linear layers, convolutions and functions, as far as measured."""
    found = []
    for gpu, own in grouped(records, lambda record: record.environment.gpu).items():
        made = (
            *_torchs(gpu, [record for record in own if record.is_torchs]),
            _models(gpu, _others(own)),
            _linears(gpu, _named(own, LINEAR)),
            _convolutions(gpu, _named(own, CONVOLUTION)),
            _by_themselves(gpu, _named(own, FUNCTION)),
        )
        found += [table for table in made if table]
    return found


def whole_models(records: Sequence[ModelRecord]) -> list[Table]:
    """Make, for each GPU, the table of its models alone."""
    tables = [
        _models(gpu, _others(own)) for gpu, own in grouped(records, lambda record: record.environment.gpu).items()
    ]
    return [table for table in tables if table]


def function_tables(records: Sequence[ModelRecord]) -> list[Table]:
    """Make a table for each model and size: its functions, by whom they were scheduled, and their part of a run."""
    whole = [record for record in records if not record.model.startswith(ATTENTION)]
    return [_functions(record) for record in whole if any(made.functions for made in record.rules)]


def _functions(record: ModelRecord) -> Table:
    header = ("rules", "function", "scheduled by", "part", "calls", "ms a call", "share", "stock", "dlight")
    rows = []
    for made in record.rules:
        total = sum(function.share_ms for function in made.functions)
        for function in sorted(made.functions, key=lambda each: -each.share_ms):
            if function.share_ms < LEAST_SHARE * total:
                continue
            part = "attention" if function.attention else ""
            times = f"{function.timing.median_ms:.4f}", f"{function.share_ms / total:.1%}"
            others = (_plain(record.function_ratio(made.name, function, other)) for other in (STOCK, DLIGHT))
            rows.append((made.name, function.name, function.rule, part, str(function.calls), *times, *others))
    title = f"{record.environment.gpu}, {record.model}, {record.case}"
    note = (
        "Kernels' times in calls of the model, by a profile"
        if record.is_torchs
        else "Functions by themselves, on what the model gives them, not in the L2; ratios to those of one name"
    )
    return Table(title, header, tuple(rows), f"{note}; those of less than 3 % of a run are left out.", left=4)


def _named(records: Iterable[ModelRecord], begin: str) -> list[ModelRecord]:
    return [record for record in records if record.model.startswith(begin)]


def _others(records: Iterable[ModelRecord]) -> list[ModelRecord]:
    parts = (LINEAR, CONVOLUTION, FUNCTION)
    return [record for record in records if not record.is_torchs and not record.model.startswith(parts)]


def _torchs(gpu: str, records: Sequence[ModelRecord]) -> Iterator[Table]:
    """Yield the tables of PyTorch models, and of attention by itself."""
    alone = _named(records, ATTENTION)
    header = ("model", "input", "ms", "torch", "torch.compile", "wall ms", "torch.compile, wall", "attention's share")
    rows = [
        (
            record.model,
            record.case,
            _time(record),
            *(_beside(record, other) for other in (TORCH, COMPILED)),
            *(_milliseconds(record, other + WALL) for other in (OURS, COMPILED)),
            _attention(record.of_rules(OURS)),
        )
        for record in records
        if record not in alone
    ]
    if rows:
        yield Table(f"PyTorch models, {gpu}", header, tuple(rows), TORCHS_NOTE, left=2)
    tokens = sorted({record.shape[1] for record in alone})
    rows = []
    for model, own in grouped(alone, lambda record: record.model).items():
        of = {record.shape[1]: record for record in own}
        kind, head = model.removeprefix(ATTENTION).rsplit("_", 1)
        cells = [_ratio(of[count].ratio(OURS, *BACKENDS)) if count in of else NOT_MEASURED for count in tokens]
        rows.append((kind, head, *cells))
    if rows:
        header = ("attention", "head", *(f"{count} tokens" for count in tokens))
        yield Table(f"Attention, {gpu}", header, tuple(rows), ATTENTION_NOTE)


def _milliseconds(record: ModelRecord, name: str) -> str:
    timing = record.times(name)
    return f"{timing.median_ms:.3f}" if timing else NOT_MEASURED


def _models(gpu: str, records: Sequence[ModelRecord]) -> Table | None:
    header = (
        "model",
        "ms",
        "stock",
        "dlight",
        "torch",
        "torch.compile",
        "without attention, torch",
        "attention's share",
    )
    rows = [
        (
            f"{record.model}, {record.case}",
            _time(record),
            *(_beside(record, other) for other in (STOCK, DLIGHT, TORCH, COMPILED)),
            _ratio(record.rest_ratio(OURS, REST)),
            _attention(record.of_rules(OURS)),
        )
        for record in records
    ]
    return Table(f"Whole models, {gpu}", header, tuple(rows), MODELS_NOTE) if rows else None


def _linears(gpu: str, records: Sequence[ModelRecord]) -> Table | None:
    values = sorted({record.value for record in records})
    rows = []
    for model, own in grouped(records, lambda record: record.model).items():
        of = {record.value: record for record in own}
        cells = [_layer(of.get(value), (TORCH, TURNED), DLIGHT) for value in values]
        rows.append((model.removeprefix(LINEAR), *cells, _of_copy(own)))
    header = ("n × k", *(f"{value} row{'s' if value > 1 else ''}" for value in values), "copy")
    return Table(f"Linear layers of Llama-3-8B, {gpu}", header, tuple(rows), LAYERS_NOTE) if rows else None


def _of_copy(records: Sequence[ModelRecord]) -> str:
    """Write bytes per second at one row over those of the fastest copy of about as many bytes, of any run."""
    one = next((record for record in records if record.value == 1), None)
    made = one and one.of_rules(OURS)
    if not made or not made.timing:
        return ""
    near = [record for record in records if record.bytes_moved <= ABOUT * one.bytes_moved]
    copies = [
        record.bytes_moved / peer.timing.median_ms
        for record in near
        for peer in record.beside
        if peer.name == COPY and peer.timing
    ]
    return f"{one.bytes_moved / made.timing.median_ms / max(copies):.2f}" if copies else ""


def _convolutions(gpu: str, records: Sequence[ModelRecord]) -> Table | None:
    rows = []
    for batch, own in sorted(grouped(records, lambda record: record.value).items()):
        to_torch, to_stock = ([record.ratio(OURS, other) for record in own] for other in (TORCH, STOCK))
        rows.append((str(batch), str(len(own)), *_summary(to_torch), *_summary(to_stock)))
    header = ("batch", "convolutions", "cuDNN, mean", "least", "stock, mean", "least")
    note = "ResNet-50's distinct convolutions, NHWC, each by itself; geometric means of ratios, and the least of them."
    return Table(f"Convolutions of ResNet-50, {gpu}", header, tuple(rows), note) if rows else None


def _by_themselves(gpu: str, records: Sequence[ModelRecord]) -> Table | None:
    rows = [
        (
            record.model.removeprefix(FUNCTION),
            str(record.value),
            _time(record),
            *(_beside(record, other) for other in (DLIGHT, TORCH)),
        )
        for record in records
    ]
    to_dlight = [ratio for record in records if (ratio := record.ratio(OURS, DLIGHT))]
    slower = sum(interval[1] < 1 for _, interval in to_dlight)
    note = f"float16, one build for any number of rows; of {len(to_dlight)} beside dlight slower than it: {slower}."
    return (
        Table(f"Functions by themselves, {gpu}", ("function", "rows", "ms", "dlight", "torch"), tuple(rows), note)
        if rows
        else None
    )


def _summary(ratios: Sequence[Ratio | None]) -> tuple[str, str]:
    known = [ratio for ratio, _ in filter(None, ratios)]
    if len(known) < len(ratios) or not known:
        return NOT_MEASURED, NOT_MEASURED
    return f"{statistics.geometric_mean(known):.2f}", f"{min(known):.2f}"


def _layer(record: ModelRecord | None, libraries: Sequence[str], dlight: str) -> str:
    if record is None or _failed(record.of_rules(OURS)):
        return NOT_MEASURED if record is None else _failed(record.of_rules(OURS))
    return Markdown("<br>").join([_ratio(record.ratio(OURS, *libraries)), _plain(record.ratio(OURS, dlight))])


def _beside(record: ModelRecord, other: str) -> str:
    return _failed(record.of_rules(other)) or _ratio(record.ratio(OURS, other))


def _time(record: ModelRecord) -> str:
    own = record.times(OURS)
    return _milliseconds(record, OURS) if own else _failed(record.of_rules(OURS)) or NOT_MEASURED


def _failed(made: RulesTimed | None) -> str:
    """Write how a set of rules failed; nothing where it did not."""
    return "" if made is None or made.status == "measured" else made.status


def _attention(made: RulesTimed | None) -> str:
    total = sum(function.share_ms for function in made.functions) if made else 0.0
    own = sum(function.share_ms for function in made.functions if function.attention) if made else 0.0
    return f"{own / total:.0%}" if own else NOT_MEASURED


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return NOT_MEASURED
    return Markdown("<br>").join([bold_ratio(*ratio), interval_text(ratio[1])])


def _plain(ratio: Ratio | None) -> str:
    return f"{ratio[0]:.2f}" if ratio else NOT_MEASURED
