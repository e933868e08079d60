"""Libraries that only the site needs, and the one error where they are missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tensorir_ladder.harness.commands.values import UsageError

EXTRA = ".venv/bin/python -m pip install -e '.[report]'"


def needed(module: str) -> ModuleType:
    """Import a library of the extra ``report``; UsageError names it, and the extra, where it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"ladder report needs the Python package of {module}, which is not here; {EXTRA}") from error
