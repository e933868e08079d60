"""Tell how far a search over several GPUs is: a line for each GPU, and one for all with the time that is left."""

from __future__ import annotations

import sys
import threading
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

TELL_S = 10.0  # between two lines where the output is no terminal


class FleetLines:
    """Lines on standard error: live on a terminal, else one for all from time to time. What happens goes above them."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = Console(stderr=True)
        self._bars = Progress(*columns, TextColumn("{task.fields[left]}"), console=self._console)
        self._lock, self._begun, self._told = threading.Lock(), time.monotonic(), 0.0
        self._lanes: dict[int, TaskID] = {}
        self._texts: dict[int, str] = {}
        self._all = self._bars.add_task("all", total=None, left="", visible=self._console.is_terminal)

    def __enter__(self) -> FleetLines:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def say(self, line: str) -> None:
        """Print a line for good."""
        with self._lock:
            if self._console.is_terminal:
                self._bars.print(escape(line))
            else:
                print(line, file=sys.stderr, flush=True)

    def lane(self, number: int, text: str) -> None:
        """Take what a GPU measures, and the best so far."""
        with self._lock:
            self._texts[number] = text
            if number not in self._lanes:
                self._lanes[number] = self._bars.add_task("", total=None, left="")
            self._bars.update(self._lanes[number], description=escape(f"{number}: {text}"))

    def total(self, done: int, of: int) -> None:
        """Take how many measurements are done, of how many."""
        spent = time.monotonic() - self._begun
        left = f"about {spent / done * (of - done):.0f} s left" if done else ""
        with self._lock:
            self._bars.update(self._all, completed=done, total=of, left=left)
            if not self._console.is_terminal and time.monotonic() - self._told > TELL_S:
                self._told = time.monotonic()
                for number, text in sorted(self._texts.items()):
                    print(f"  {number}: {text}", file=sys.stderr)
                print(f"  {done} of {of} measurements, {spent:.0f} s; {left}", file=sys.stderr, flush=True)
