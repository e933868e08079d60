"""README and docs say what is so: their code runs, their commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tensorir_ladder.steps.registry import find_steps

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))


@pytest.mark.parametrize("page", ["README.md", "docs/schedules.md", "docs/relax.md"])
def test_python_examples_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    names: dict[str, object] = {}
    for block in blocks:  # each goes on from the one before, as a reader would
        exec(compile(block, page, "exec"), names)
    assert {"plan", "ex"} & names.keys()
    if "kernel" in names:
        assert "ptx_cp_async" in names["kernel"].mod.imports[0].inspect_source()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [target for target in targets if target and not (ROOT / page).parent.joinpath(target).exists()]


def test_quick_start_is_two_lines():
    section = README.split("## Quick start")[1].split("\n## ")[0]
    commands = [line for block in re.findall(r"```bash\n(.*?)```", section, re.S) for line in block.splitlines()]
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && ") for command in commands)


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_real_subcommands_and_options(page: str) -> None:
    from tensorir_ladder.harness.cli import parse

    for command in re.findall(r"`ladder ([^`\n]*)`", (ROOT / page).read_text(encoding="utf-8")):
        if not re.search(r"RECORD|FILE|--help|…", command):
            parse(command.split())


def test_the_steps_table_says_what_the_steps_take():
    page = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) ([a-z0-9 ]+) \| [^|]+ \| ([^|]+) \| [^|]+ \|$", page, re.M)
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
    prose = README.split("<!-- summary:begin -->")[0] + README.split("<!-- summary:end -->")[1]
    assert not re.findall(r"[\d.,]+ ?(?:GFLOPS|TFLOPS|GB/s|µs|×)", prose)
    assert not re.findall(r"[\d.]+ % (?:of|faster|slower)", prose)


def test_the_readme_fits_on_a_screen_and_a_half():
    assert len(README.splitlines()) <= 150
