"""``ladder COMMAND …``, and ``python steps/stepN_name.py …``, which is ``ladder run --step N …``.

The table below has every command; its module is imported when the command is named, so that help needs neither TVM
nor torch. Nothing heavier may be imported here.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tensorir_ladder.harness.commands import BAD_INPUT, WRONG

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
        "sweep": Command("measure all combinations of tiles, stage counts and variants", "GPU, compiler; minutes"),
    },
    "look": {
        "list": Command("show steps, variants, tiles, architectures and peers", "nothing; seconds"),
        "compile": Command("compile the generated CUDA, print it, say what it occupies", "compiler; a second a case"),
        "depth": Command("predict time, memory and occupancy of each stage count", "compiler; seconds a step"),
        "rebuild": Command("lower recorded cases again: is the CUDA the recorded one?", "nothing; minutes"),
    },
    "measure": {
        "bandwidth": Command("measure memory-bound workloads beside a copy and torch", "GPU (else verifies); minutes"),
        "counters": Command("count what the hardware does: pipes, conflicts, stalls", "GPU, ncu; 10 s a case"),
        "timeline": Command("record one block's loads, waits and multiplications", "GPU, compiler; 10 s a case"),
        "launch": Command("time the host's part of a launch, TVM's and our own", "GPU, compiler; seconds a case"),
    },
    "tune": {
        "tune": Command("search a step's space, confirm and keep the best", "GPU, compiler; minutes a shape"),
    },
    "lab": {
        "fuzz": Command("run drawn shapes and configurations: each right, or refused", "C++ compiler or GPU; minutes"),
        "mutants": Command("change generated CUDA by rule: is every harmful change caught?", "C++ compiler; minutes"),
        "traces": Command("record where instructions put and find each element", "H100 or H200, compiler; a minute"),
        "sanitize": Command("hold the emulator to compute-sanitizer on broken kernels", "GPU, its sanitizer; minutes"),
        "microbench": Command("measure the GPU's own rates, which predictions need", "GPU, compiler; minutes"),
    },
    "reports": {
        "table": Command("print the records as tables, Markdown or JSON", "nothing; seconds"),
        "stages": Command("print what each stage brings and costs, judge the depth model", "nothing; seconds"),
        "plot": Command("draw speeds, gains, rooflines, stage sweeps and timelines as PNG", "nothing; a minute"),
        "page": Command("write a Markdown page per step, one on stages, and their pictures", "nothing; seconds"),
        "readme": Command("rewrite the README's results, and draw its pictures", "nothing; seconds"),
        "check": Command("check every record, and that README and pictures follow", "nothing; a minute"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
EXAMPLES = """\
  ladder list                                    what there is
  python steps/step5_pipelining.py               run one step and compare its variants
  ladder run --step 1-6 --size 1024              the ladder at one size
  ladder run --step 6 --tile best --size 4096    with the best tile of the declared set
  ladder verify --step 5 --shape 33x17x50        check a ragged shape
  ladder verify --step 9 --on emulator           the generated CUDA, run and attacked on the CPU
  ladder compile --step 5 --variant sync --show cuda
  ladder bandwidth --workload softmax --mb 256   memory-bound, 1 to 5 stages, beside a copy
  ladder sweep --step 5 --stages 1-6 --size 512  every stage count, each a record
  ladder timeline --step 11 --stages 1,2,4       what one block does when; needs a GPU
  ladder depth --step 5 --size 512               how many stages, by the model; needs no GPU
  ladder launch --step 11 --size 512             host time per launch, TVM's and ours
  ladder tune --step 5 --size 1024 --budget 120  the best of a declared space, kept on disk
  ladder run --step 5 --size 1024 --tile tuned   measured as it was tuned
  ladder rebuild --step 5 --limit 20             is the CUDA of records still what it was?
  ladder table --step 5 --markdown               step 5 and its variants as Markdown
"""
STATUS = "exit status: 0 right, 1 a wrong result or a difference, 2 refused, 3 could not be verified"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (0 right, 1 wrong result, 2 refused, 3 could not be verified)."""
    arguments = _join_negative(list(sys.argv[1:] if arguments is None else arguments))
    name = _top().parse_args(arguments[:1]).command
    if name in GROUPS["reports"]:
        return _reports().main(arguments)
    try:
        options = parse(arguments)
        return _module(name).run(options, shlex.join(["ladder", *_repeatable(arguments)]))
    except KeyboardInterrupt:
        print("interrupted; what is measured is on disk, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError:
        print("error: out of memory; give a smaller shape, or run on a GPU", file=sys.stderr)
        return BAD_INPUT
    except Exception as error:
        # The project's own exceptions say in a line what is refused or wrong; any other is a bug, and shows where.
        if type(error).__module__.partition(".")[0] != PACKAGE:
            raise
        return _refuse(error)


def run_step(file: str) -> None:
    """Run a step's own file as ``ladder run --step N …`` with the process's arguments, and exit."""
    number = re.match(r"step(\d+)_", Path(file).name).group(1)
    sys.exit(main(["run", "--step", number, *sys.argv[1:]]))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read a command's options, of which ``command`` is its name; import its module."""
    name = _top().parse_args(arguments[:1]).command
    if name in GROUPS["reports"]:
        return _reports().parse(arguments)
    own = [line for line in EXAMPLES.splitlines() if line.startswith(f"  ladder {name} ")]
    parser = argparse.ArgumentParser(
        prog=f"ladder {name}",
        description=COMMANDS[name].sentences,
        epilog="\n".join([*(["examples:", *own, ""] if own else []), STATUS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=name)
    _module(name).add_options(parser)
    return parser.parse_args(arguments[1:])


def _module(name: str) -> ModuleType:
    return import_module(f"{PACKAGE}.harness.commands.{name}")


def _reports() -> ModuleType:
    return import_module(f"{PACKAGE}.reports.__main__")  # by name: nothing here depends on reports


def _top() -> argparse.ArgumentParser:
    """Make the parser of the command's name alone, whose help lists all of them."""
    width = max(len(command.text) for command in COMMANDS.values())
    lines = []
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        lines += [f"  {name:<11}{text:<{width}}  [{needs}]" for name, (text, needs) in commands.items()]
    parser = argparse.ArgumentParser(
        prog="ladder",
        usage="ladder COMMAND [options]; ladder COMMAND --help has a command's options",
        description="Build, verify and measure the steps of the ladder.",
        epilog="\n".join([*lines, "", "examples:", EXAMPLES, STATUS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below; [what it needs]")
    return parser


def _refuse(error: Exception) -> int:
    from tensorir_ladder.emulator.errors import KernelFault
    from tensorir_ladder.harness.verify import WrongResult

    text = f"{'wrong result: ' if isinstance(error, WrongResult) else ''}{error}"
    if isinstance(error, KernelFault):
        text = text.replace(f"(seed {error.seed} repeats it)", f"(--emulator-seed {error.seed} repeats it)")
    print(f"error: {text}", file=sys.stderr)
    return WRONG if isinstance(error, WrongResult | KernelFault) else BAD_INPUT


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
    """Keep the arguments that say what is measured, without those that say where results and tree lie."""
    places = ("--out", "--revision")
    kept = [argument for argument in arguments if not argument.startswith(tuple(f"{place}=" for place in places))]
    return [word for before, word in zip(["", *kept], kept) if word not in places and before not in places]
