"""Names of files that are made of what a record, a GPU or a user says: letters, digits, ``_``, ``.`` and ``-``.

Whatever becomes part of a path goes through :func:`path_name`, so that no text can lead out of its folder.
"""

from __future__ import annotations

import re

LONGEST_NAME, LONGEST_FILE_NAME = 50, 250  # a file's name has several
NAME = rf"^[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{LONGEST_NAME - 1}}}\Z"
FILE_NAME = NAME.replace(str(LONGEST_NAME - 1), str(LONGEST_FILE_NAME - 1))


class RecordError(ValueError):
    """A results file or folder that cannot be used; the message names the path and the remedy."""


def path_name(text: str) -> str:
    """Return a text that may be part of a path, as it is; RecordError for any other."""
    if not re.search(FILE_NAME, text):
        raise RecordError(
            f"{text[:LONGEST_NAME]!a} cannot be a file's name (at most {LONGEST_FILE_NAME} of A-Z, a-z, 0-9, _, . and "
            "-, beginning with neither . nor -); give it another name"
        )
    return text


def gpu_slug(gpu: str) -> str:
    """Write a GPU's name as file names have it, ``h200`` for ``NVIDIA H200``."""
    slug = re.sub(r"[^a-z0-9_.]+", "-", gpu.lower().replace("nvidia ", "")).strip("-.")
    return path_name(slug or "unnamed")
