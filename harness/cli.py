"""``ladder COMMAND …``, and ``python steps/stepN_name.py …``, which is ``ladder run --step N …``.

The table below has every command; its module is imported when the command is named, so that help needs neither TVM
nor torch. Nothing heavier may be imported here.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from tensorir_ladder.harness.commands import BAD_INPUT, DEFECT, WRONG

PACKAGE = __name__.partition(".")[0]
INTERRUPTED, BROKEN_PIPE = 130, 141


class Command(NamedTuple):
    """A command's line in the help: what it does; what it needs, and how long it takes."""

    text: str
    needs: str

    @property
    def sentences(self) -> str:
        """The beginning of the command's own help."""
        return f"{self.text[0].upper()}{self.text[1:]}. Needs: {self.needs}."


GROUPS = {
    "run": {
        "run": Command("verify, then measure beside cuBLAS and the step before", "GPU (else verifies); seconds a case"),
        "verify": Command("check outputs only", "GPU, or CPU alone; seconds a case"),
        "build": Command("build the kernels of a file of shapes before torch_ops.matmul calls", "compiler; minutes"),
        "sweep": Command("measure all combinations of tiles, stage counts and variants", "GPU, compiler; minutes"),
    },
    "look": {
        "list": Command("show steps, variants, tiles, architectures and peers", "nothing; seconds"),
        "show": Command("print a step's schedule, and its TensorIR, CUDA, PTX or machine code", "nothing; seconds"),
        "explain": Command("tell a step's pipeline: what runs when, in which stage", "nothing; seconds"),
        "diff": Command("print how two steps' schedules or code differ", "nothing; seconds"),
        "doctor": Command("tell what this machine has, and what is missing for what", "nothing; seconds"),
        "compile": Command("compile the generated CUDA, print it, say what it occupies", "compiler; a second a case"),
        "depth": Command("predict time, memory and occupancy of each stage count", "compiler; seconds a step"),
        "rebuild": Command("lower recorded cases again: is the CUDA the recorded one?", "nothing; minutes"),
    },
    "measure": {
        "bandwidth": Command("measure memory-bound workloads beside a copy and torch", "GPU (else verifies); minutes"),
        "bench": Command(
            "measure drawn shapes beside cuBLAS, group by group", "GPU (else --dry-run); a second a shape"
        ),
        "model": Command(
            "time whole models by stock TVM, dlight and our rules, beside torch", "GPU (else verifies); minutes"
        ),
        "counters": Command("count what the hardware does: pipes, conflicts, stalls", "GPU, ncu; 10 s a case"),
        "timeline": Command("record one block's loads, waits and multiplications", "GPU, compiler; 10 s a case"),
        "launch": Command("time the host's part of a launch, TVM's and our own", "GPU, compiler; seconds a case"),
    },
    "tune": {
        "tune": Command("search a step's space, confirm and keep the best", "GPUs, compiler; minutes a shape"),
        "calibrate": Command("time what is chosen from on this GPU, fit the choices to it", "GPU, compiler; an hour"),
        "serve": Command("offer this host's GPUs to searches on other machines", "GPUs; until interrupted"),
    },
    "lab": {
        "fuzz": Command("run drawn shapes and configurations: each right, or refused", "C++ compiler or GPU; minutes"),
        "nests": Command("pipeline drawn loop nests: the same results, or refused", "C++ compiler; minutes"),
        "rules": Command("offer drawn functions to the rules for TVM: each right, or left", "C++ compiler; minutes"),
        "mutants": Command("change generated CUDA by rule: is every harmful change caught?", "C++ compiler; minutes"),
        "traces": Command("record where instructions put and find each element", "H100 or H200, compiler; a minute"),
        "sanitize": Command("hold the emulator to compute-sanitizer on broken kernels", "GPU, its sanitizer; minutes"),
        "microbench": Command("measure the GPU's own rates, which predictions need", "GPU, compiler; minutes"),
    },
    "reports": {
        "table": Command("print the records as tables, Markdown or JSON", "nothing; seconds"),
        "stages": Command("print what each stage brings and costs, judge the depth model", "nothing; seconds"),
        "shapes": Command("print how drawn shapes stand beside cuBLAS, and draw them", "nothing; seconds"),
        "energy": Command("print joules a product, watts and clocks beside cuBLAS's", "nothing; seconds"),
        "plot": Command("draw speeds, gains, rooflines, stage sweeps and timelines as PNG", "nothing; a minute"),
        "page": Command("write a Markdown page per step, one on stages, and their pictures", "nothing; seconds"),
        "report": Command("write the site: ladder, lessons, comparisons, stages; offline", "nothing; a minute"),
        "listings": Command("compile the default kernels: PTX and machine code for the site", "compiler; minutes"),
        "readme": Command("rewrite the README's results, and draw its pictures", "nothing; seconds"),
        "check": Command("check every record, and that README and pictures follow", "nothing; a minute"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
EXAMPLES = """\
  ladder list                                    what there is
  python steps/step5_pipelining.py               run one step
  python steps/step5_pipelining.py --all-variants  compare its variants
  ladder show 5 --show cuda                      its schedule, and the CUDA made of it
  ladder explain 5 --stages 4                    what runs when with four stages
  ladder diff 4 5                                what pipelining changes in the schedule
  ladder run --step 1-6 --size 1024              the ladder at one size
  ladder run --step 6 --tile best --size 4096    with the best tile of the declared set
  ladder verify --step 5 --shape 33x17x50        check a ragged shape
  ladder verify --step 9 --on emulator           the generated CUDA, run and attacked on the CPU
  ladder compile --step 5 --variant sync --show cuda
  ladder bandwidth --workload softmax --mb 256   memory-bound, 1 to 5 stages, beside a copy
  ladder sweep --step 5 --stages 1-6 --size 512  every stage count, each a record
  ladder timeline --step 11 --stages 3,4         what one block does when; needs a GPU
  ladder model --model llama-layer --seq 1-8192  a Llama layer by stock TVM, dlight, our rules and torch
  ladder depth --step 5 --size 512               how many stages, by the model; needs no GPU
  ladder bench --shapes random --seed 1 --count 200  shapes that nobody tuned, beside cuBLAS
  ladder build --shapes FILE                     kernels of torch_ops.matmul, before they are called
  ladder launch --step 11 --size 512             host time per launch, TVM's and ours
  ladder tune --step 5 --size 1024 --budget 120  the best of a declared space, kept on disk
  ladder tune --step 10-13 --size 4096 --gpus 4  the same on four GPUs, the likeliest candidates only
  ladder run --step 5 --size 1024 --tile tuned   measured as it was tuned
  ladder rebuild --step 5 --limit 20             is the CUDA of records still what it was?
  ladder table --step 5 --markdown               step 5 and its variants as Markdown
"""
STATUS = """\
exit status: 0 right, 1 a wrong result, 2 refused (by these options, files or this machine), 3 could not be verified,
4 a defect of this program, 5 what should agree differs (check, rebuild, traces, sanitize), 130 interrupted, 141 nobody
reads the output"""
LONGEST_LINE = 1000
# What output in ASCII has in these places; "?" for others.
IN_ASCII = {"×": "x", "·": "*", "–": "-", "−": "-", "²": "^2", "³": "^3", "µ": "u", "…": "...", "≥": ">=", "ᵀ": "^T"}


class Misused(ValueError):
    """A command line that cannot be understood."""


class _Done(Exception):
    """Help was printed, and that is all."""


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are one line, by :class:`Misused`, and whose commands all take ``--debug``."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(*arguments, formatter_class=form, allow_abbrev=False, **named)  # --out is no --out-dtype
        self.add_argument("--debug", action="store_true", help="show where an error was raised (also LADDER_DEBUG=1)")

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        raise Misused(f"{message}; {self.prog} --help says what there is")

    def print_help(self, file: Any = None) -> None:
        """See argparse, which hides that it could not."""
        print(as_typed(self.format_help()), end="")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """See argparse."""
        raise _Done


def as_typed(text: str) -> str:
    """Write commands in a text as they can be typed where the program was started.

    ``ladder diff 4 5`` stays itself where the environment is active, and else becomes ``.venv/bin/ladder diff 4 5``.
    """
    names = "|".join(COMMANDS)
    text = re.sub(rf"(?<![\w/.-])ladder(?= (?:{names})\b)", lambda _: _program("ladder"), text)
    return re.sub(r"(?<![\w/.-])python(?= steps/)", lambda _: _program("python"), text)


def _program(name: str) -> str:
    """Name a program of this environment: by itself where the shell finds it, else by its path from here."""
    own, found = Path(sys.executable).with_name(name), shutil.which(name)
    if not own.exists() or (found and Path(found).parent.samefile(own.parent)):
        return name
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (``STATUS``); nothing but an exit status leaves it."""
    return guarded(_run, arguments)


def guarded(work: Callable[[list[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Do ``work(arguments)``, those of the process where none are given; return the exit status of how it ended.

    An error is one line on standard error. With ``--debug`` anywhere, or LADDER_DEBUG in the environment, the
    traceback stands before it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("LADDER_DEBUG", "0") not in ("", "0")
    code = 0
    try:
        _make_printable()
        with suppress(_Done):
            code = work(_join_negative(_checked([argument for argument in given if argument != "--debug"])))
        sys.stdout.flush()
        return code
    except BaseException as error:  # noqa: BLE001 - the one place where all errors end
        if debug:
            traceback.print_exc()
        return _end(error)


def _run(arguments: list[str]) -> int:
    name = _top().parse_args(arguments[:1]).command
    if name in GROUPS["reports"]:
        return _reports().run(parse(arguments))
    module, line = _module(name), shlex.join(["ladder", *_repeatable(arguments)])
    if not hasattr(module, "ahead"):
        return module.run(parse(arguments), line)
    with module.ahead(arguments[1:]) as begun:  # what takes long to start, before options are read
        return module.run(parse(arguments), line, begun)


def run_step(file: str) -> None:
    """Run a step's own file as ``ladder run --step N …`` with the process's arguments, and exit."""
    number = re.match(r"step(\d+)_", Path(file).name).group(1)
    sys.exit(main(["run", "--step", number, *sys.argv[1:]]))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read a command's options, of which ``command`` is its name; import its module. Raises Misused."""
    name = _top().parse_args(arguments[:1]).command
    if name in GROUPS["reports"]:
        return _reports().parse(arguments)
    return parser_of(name).parse_args(arguments[1:])


def parser_of(name: str) -> Parser:
    """Make the parser of a command's options; import its module."""
    if name in GROUPS["reports"]:
        return _reports().parsers()[name]
    own = [line for line in EXAMPLES.splitlines() if line.startswith(f"  ladder {name} ")]
    epilog = "\n".join([*(["examples:", *own, ""] if own else []), STATUS])
    parser = Parser(prog=f"ladder {name}", description=COMMANDS[name].sentences, epilog=epilog)
    parser.set_defaults(command=name)
    _module(name).add_options(parser)
    return parser


def _module(name: str) -> ModuleType:
    room = "lab" if name in GROUPS["lab"] else "harness"
    if find_spec(f"{PACKAGE}.{room}") is None:
        raise Misused(f"{name} tests the project itself and is not installed with it; clone it, and pip install -e .")
    return import_module(f"{PACKAGE}.{room}.commands.{name}")


def _reports() -> ModuleType:
    return import_module(f"{PACKAGE}.reports.__main__")  # by name: nothing here depends on reports


def _top() -> argparse.ArgumentParser:
    """Make the parser of the command's name alone, whose help lists all of them."""
    width = max(len(command.text) for command in COMMANDS.values())
    lines = []
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        lines += [f"  {name:<11}{text:<{width}}  [{needs}]" for name, (text, needs) in commands.items()]
    parser = Parser(
        prog="ladder",
        usage="ladder COMMAND [options]; ladder COMMAND --help has a command's options",
        description="Build, verify and measure the steps of the ladder.",
        epilog="\n".join([*lines, "", "examples:", EXAMPLES, STATUS]),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below; [what it needs]")
    return parser


def _end(error: BaseException) -> int:
    """Say in one line how a command ended, and return the exit status for it."""
    code, text = _verdict(error)
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:  # what it still holds is dropped, or Python would fail again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if text and sys.stderr:
        line = " ".join(as_typed(text).split())
        if len(line) > LONGEST_LINE:
            line = f"{line[: LONGEST_LINE // 2]} … {line[-LONGEST_LINE // 2 :]}"
        with suppress(OSError):  # where nothing can be said, the exit status says it
            print(line, file=sys.stderr, flush=True)
    return code


def _verdict(error: BaseException) -> tuple[int, str]:
    kind, text = type(error), str(error)
    home = kind.__module__.partition(".")[0]
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; what is measured is on disk, and the same command goes on from there"
    if isinstance(error, MemoryError) or kind.__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return BAD_INPUT, "error: out of memory; give a smaller shape, or run on a GPU with more"
    if home == PACKAGE:
        return _own_verdict(error, text)
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE, ""
    if isinstance(error, OSError):
        what = f"cannot use {error.filename}" if error.filename else "cannot write output"
        return BAD_INPUT, f"error: {what} ({error.strerror or text}); give another place, or free this one"
    if isinstance(error, ImportError) and (error.name or PACKAGE).partition(".")[0] != PACKAGE:
        return BAD_INPUT, f"error: {text}; install the project with what it depends on (pip install -e .)"
    return DEFECT, f"error: a defect of this program: {kind.__name__}: {text[:200]}{_place(error)}; --debug shows more"


def _own_verdict(error: BaseException, text: str) -> tuple[int, str]:
    # The project's own errors are refusals, but those of a kernel that does not do what it should.
    from tensorir_ladder.emulator.errors import KernelFault

    if isinstance(error, KernelFault):
        again = f"{error.seed} repeats it)"
        return WRONG, "error: " + text.replace(f"(seed {again}", f"(--emulator-seed {again}")
    if type(error).__name__ == "WrongResult":  # by name: its module needs TVM
        return WRONG, f"error: wrong result: {text}"
    return BAD_INPUT, f"error: {text}"


def _place(error: BaseException) -> str:
    """Name the innermost line of the project that an error came through."""
    root = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    return f" ({os.path.relpath(frames[-1].filename, root)}, line {frames[-1].lineno})" if frames else ""


def _make_printable() -> None:
    """Have output in a small alphabet, as ASCII, replace what it has no letter for; Misused where it is closed."""
    if sys.stdout is None:
        raise Misused("standard output is closed; send it somewhere, at least to /dev/null")
    codecs.register_error("in_ascii", lambda error: (_in_ascii(error.object[error.start : error.end]), error.end))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="in_ascii")


def _in_ascii(text: str) -> str:
    return "".join(IN_ASCII.get(character, "?") for character in text)


def _checked(arguments: list[str]) -> list[str]:
    """Refuse what no option takes: empty values, as unset variables of a shell leave them, and NUL."""
    for before, argument in zip(["ladder", *arguments], arguments):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise Misused(f"an empty value behind {argument or before}; give one, or leave the option out")
        if "--" in (argument, argument.partition("=")[-1]):
            raise Misused("-- is no value, and no command takes any without an option; leave it out")
        if "\0" in argument:
            raise Misused(f"a NUL character in {argument!r}; leave it out")
    return arguments


def _join_negative(arguments: list[str]) -> list[str]:
    """Join an option and a value that begins with a minus, which argparse would take for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _repeatable(arguments: list[str]) -> list[str]:
    """Keep the arguments that say what is measured, without those that say where results lie, and for how long."""
    places = ("--out", "--revision", "--time-limit")
    kept = [argument for argument in arguments if not argument.startswith(tuple(f"{place}=" for place in places))]
    return [word for before, word in zip(["", *kept], kept) if word not in places and before not in places]
