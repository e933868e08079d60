"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

from tensorir_ladder.steps.registry import find_steps

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:  # each goes on from the one before, as a reader would
        exec(compile(block, "README.md", "exec"), names)
    assert "ptx_cp_async" in names["kernel"].mod.imports[0].inspect_source()


def test_quick_start_is_two_lines():
    section = README.split("## Quick start")[1].split("\n## ")[0]
    commands = [line for block in re.findall(r"```bash\n(.*?)```", section, re.S) for line in block.splitlines()]
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && ") for command in commands)


def test_commands_name_real_subcommands_and_options():
    from tensorir_ladder.harness.cli import parse

    for command in re.findall(r"`ladder ([^`]*)`", README):
        if "RECORD" not in command and "…" not in command:
            parse(command.split())


def test_the_steps_table_says_what_the_steps_take():
    rows = re.findall(r"^\| (\d+) ([a-z0-9 ]+) \| [^|]+ \| ([^|]+) \| [^|]+ \|$", README, re.M)
    assert [(int(number), name) for number, name, _ in rows] == [
        (step.number, step.name.split("_", 1)[1].replace("_", " ")) for step in find_steps().values()
    ]
    for (_, _, operands), step in zip(rows, find_steps().values()):
        taken = {", ".join(step.variant(step.variant_names[0]).dtypes)}
        taken |= {
            f"variant {v}: {', '.join(step.variant(v).dtypes)}"
            for v in step.variant_names
            if step.variant(v).math != "ieee"
        }
        assert set(operands.split("; ")) == taken, step.name


def test_no_measured_number_stands_outside_the_generated_block():
    prose = README.split("<!-- results:begin -->")[0] + README.split("<!-- results:end -->")[1]
    assert not re.findall(r"[\d.,]+ ?(?:GFLOPS|TFLOPS|GB/s|µs|×)", prose)
    assert not re.findall(r"[\d.]+ % (?:of|faster|slower)", prose)
