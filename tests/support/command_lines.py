"""Command lines that nobody should write, drawn over every command and option."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tensorir_ladder.harness import cli

NUMBERS = ("0", "-1", "1", "2,1", "1-", "3-1", "1-99999", "9" * 23, "9" * 4301, "-" + "9" * 400, "1e400", "nan", "inf")
SHAPES = ("1x1x1", "0x1x1", "16x16", "2147483647x1x1", "46340x46340x1", "1x-1x1", "16x16x16/4x4", "1x1x2147483647/1x1")
WORDS = (
    "",
    "x",
    "all",
    "default",
    "best",
    "tuned",
    "none",
    "float64",
    "sm_80",
    "hopper",
    "nt",
    "async,async",
    "%s",
    "{}",
)
ODD = (
    "²",
    "٣",
    "ümläut",
    "\udcff",
    "a\0b",
    "a\nb",
    "\x1b[31m",
    "--",
    "-",
    "*",
    "x" * 5000,
    "../../up",
    "'; rm -rf x",
    "~",
)


def places(folder: Path) -> list[str]:
    """Paths of every unsuitable kind, made in a folder."""
    (folder / "file").write_bytes(b"\xff\xfenot json")
    (folder / "empty.jsonl").touch()
    (folder / "broken-steps.jsonl").write_text('{"schema": 1e400, "kind": ' + "[" * 5000 + "\n")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "closed").mkdir(mode=0o000)
    names = ("", "file", "file/below", "empty.jsonl:1", "broken-steps.jsonl:1", "loop", "closed/x", "missing/deep")
    devices = ["/dev/full", "/dev/null", "/proc/self/mem", "/dev/full/x", "/proc/x"]
    return [str(folder / name) for name in names] + devices


def command_lines(count: int, seed: int, folder: Path) -> Iterator[list[str]]:
    """Draw command lines; each command is among them, and each of its options with values of every kind."""
    draw, bad = random.Random(seed), places(folder)
    values = [*NUMBERS, *SHAPES, *WORDS, *ODD, *bad]
    for number in range(count):
        name = list(cli.COMMANDS)[number % len(cli.COMMANDS)]
        parser = cli.parser_of(name)
        options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
        line = [name]
        for action in draw.choices(options, k=draw.choice((1, 1, 2, 3, 5))):
            line += _given(action, draw, values)
        yield line + draw.choice(([], [], [], [draw.choice(values)], ["--help"], ["--debug"]))


def _given(action: argparse.Action, draw: random.Random, values: list[str]) -> list[str]:
    option = draw.choice(action.option_strings)
    if action.nargs == 0:
        return [option]
    value = draw.choice([*action.choices] if action.choices and draw.random() < 0.7 else values)
    if action.dest == "step" and draw.random() < 0.8:
        value = str(draw.randint(1, 14))  # so that other options are looked at
    return [f"{option}={value}"] if draw.random() < 0.3 else [option, value]
