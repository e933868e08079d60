"""README and docs say what is so: their code runs, their commands and links exist."""

from __future__ import annotations

import ast
import html
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cases import Outcome
from tensorir_ladder.harness.cli import COMMANDS, as_typed, parse
from tensorir_ladder.steps.registry import find_steps

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
BARE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TEMPLATES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "reports" / "templates").rglob("*.j2"))
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
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
    assert all(command.startswith("python3 -m venv .venv && . .venv/bin/activate && ") for command in commands)


@pytest.mark.skipif(not (BIN / "activate").exists(), reason="runs in no virtual environment")
def test_the_quick_start_leaves_the_shell_with_what_the_pages_type() -> None:
    """The quick start activates the environment; ``ladder`` and ``pip`` are then typed as they stand on the pages."""
    shell = f". {shlex.quote(str(BIN / 'activate'))} && ladder list >/dev/null && command -v ladder python pip"
    done = subprocess.run(["bash", "-c", shell], env={"PATH": BARE_PATH}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {Path(line).parent for line in done.stdout.split()} == {BIN}


@pytest.mark.skipif(not (BIN / "ladder").exists(), reason="the project is not installed where Python is")
def test_what_a_step_proposes_can_be_typed_where_nothing_is_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"cwd": ROOT, "env": {"PATH": BARE_PATH, "HOME": str(tmp_path)}, "capture_output": True, "text": True}
    step = [sys.executable, "steps/step4_vectorization.py", "--shape", "32x32x32", "--on", "llvm"]
    done = subprocess.run(step, **given)
    assert done.returncode == 0, done.stderr
    proposed = re.findall(r"^  (\S.*?)  ", done.stdout.partition("next:")[2], re.M)
    assert len(proposed) == 2
    for command in proposed:
        assert subprocess.run(["bash", "-c", command], **given).returncode == 0, command
    monkeypatch.setenv("PATH", BARE_PATH)
    monkeypatch.chdir(tmp_path)
    assert shlex.split(as_typed("ladder diff 4 5")) == [str(BIN / "ladder"), "diff", "4", "5"]
    monkeypatch.setenv("PATH", f"{BIN}:{BARE_PATH}")
    assert as_typed("ladder diff 4 5") == "ladder diff 4 5"


def shown_on(page: str) -> list[list[str]]:
    """List the commands in a page's text, in its blocks of code and, for a template, in what the site proposes."""
    text = html.unescape((ROOT / page).read_text(encoding="utf-8"))
    blocks = "\n".join(re.findall(r"```(?:bash|text)?\n(.*?)```", text, re.S))
    shown = re.findall(r"`(ladder [^`]*)`|<code>(ladder [^<]*)</code>|\"(ladder [^\"]*)\"", text)
    lines = re.findall(r"^ *(ladder .*?)(?:  .*)?$", blocks, re.M)
    commands = [*("".join(found) for found in shown), *lines]
    return [shlex.split(one, comments=True)[1:] for one in commands if not re.search(r"FILE|FOLDER|…|\$|{{", one)]


@pytest.mark.parametrize("page", [*(page for page in PAGES if page != "CHANGELOG.md"), *TEMPLATES])
def test_commands_work_as_they_are_shown(page: str, command: Callable[..., Outcome]) -> None:
    """All are understood; those run that need nothing but a moment."""
    for words in shown_on(page):
        if words[-1] == "--help":
            assert words[0] in {"COMMAND", "--help", *COMMANDS}
            continue
        parse(words)
        if words[0] in ("list", "show", "explain", "diff") and not {"sass", "4096"} & {*words}:
            outcome = command(*words)
            assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("folder", FOLDERS)
def test_commands_that_programs_print_are_understood(folder: str) -> None:
    """Those with options, in any text of the code; what a program fills in is left out."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {part for node in filled for part in node.values}
        texts = [
            "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values) for node in filled
        ]
        whole = [node for node in nodes if isinstance(node, ast.Constant) and node not in parts]
        texts += [node.value for node in whole if isinstance(node.value, str)]
        option = r" --[a-z-]+(?: (?!--)[\w.,:/…-]+)?"
        for found in re.findall(rf"\bladder ([a-z]+(?: [\d…]+(?::\w+)?)*(?:{option})*)", "\n".join(texts)):
            if found.split()[0] in COMMANDS and "…" not in found:
                parse(found.split())


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
