"""Decode JSON from disk: to its type, field by field, or not at all.

Nothing that is read is trusted. On top of types and ranges, which msgspec checks, a text is refused that names a field
twice or has one that its type does not know, and numbers and characters that could not be written again.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec

from tensorir_ladder.harness.records.names import RecordError

Kind = TypeVar("Kind")
DEEPEST = 16  # of a record; lists in lists, fields in fields
LARGEST = 2**53  # whole numbers that every reader of JSON keeps
LONGEST_LINE = 2**24  # bytes; a timeline, the longest record, has some hundred thousand
HALF_CHARACTERS = re.compile("[\ud800-\udfff]")
_WORDS: dict[str, str] = {}  # for what msgspec says of a text's pattern


class NotJson(RecordError):
    """A text that is no whole JSON, as an interrupted write leaves one."""


def text_like(pattern: str, words: str) -> Any:
    """Make a type of texts that a pattern matches; ``words`` say in an error what was expected."""
    _WORDS[f"`str` matching regex {pattern!r}"] = words
    return Annotated[str, msgspec.Meta(pattern=pattern)]


def decode(text: str | bytes, kind: type[Kind], origin: str, remedy: str = "delete or restore it") -> Kind:
    """Decode a text to a type; RecordError names ``origin``, the field, what is wrong, and the remedy."""
    plain = parse(text, origin, remedy)
    try:
        _check_values(plain, "$")
        found = msgspec.convert(plain, kind)
        _check_known(plain, msgspec.to_builtins(found), "$")
    except ValueError as error:  # msgspec's ValidationError is one
        why = str(error)
        for regex, words in _WORDS.items():
            why = why.replace(regex, words)
        raise RecordError(f"{origin} is no {_name(kind)} ({why}); {remedy}") from error
    return found


def parse(text: str | bytes, origin: str, remedy: str = "delete or restore it") -> Any:
    """Parse JSON of whatever kind; NotJson where a text is none or ends early, RecordError where it is no record's."""
    if len(text) > LONGEST_LINE:
        raise RecordError(f"{origin} has {len(text)} bytes, limit {LONGEST_LINE}; {remedy}")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NotJson(f"{origin} is not whole JSON ({error}); {remedy}") from error
    except RecursionError as error:
        raise RecordError(f"{origin} is no record (nested deeper than {DEEPEST}); {remedy}") from error
    except ValueError as error:  # what the hooks refuse, and numbers of thousands of digits
        raise RecordError(f"{origin} is no record ({error}); {remedy}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice[:100]!a} stands there twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_values(value: Any, place: str, depth: int = 0) -> None:
    # Numbers and texts that any reader and writer can take, whatever the field.
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} - at `{place[:100]}`")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_values(name, place, depth + 1)
            _check_values(item, f"{place}.{name}", depth + 1)
    elif isinstance(value, list):
        each = f"{place}[...]"
        for item in value:
            _check_values(item, each, depth + 1)
    elif isinstance(value, str):
        if HALF_CHARACTERS.search(value) or "\0" in value:
            raise ValueError(f"a character that is none - at `{place[:100]!a}`")
    elif isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"a number beyond ±2**53 - at `{place[:100]!a}`")


def _check_known(given: Any, taken: Any, place: str) -> None:
    # Whatever the type does not know is lost on the way; a field that is spelt wrong must not go unnoticed.
    if isinstance(given, dict):
        for name, value in given.items():
            if name not in taken:
                raise ValueError(f"unknown field {name[:100]!a} - at `{place}`")
            _check_known(value, taken[name], f"{place}.{name}")
    elif isinstance(given, list):
        each = f"{place}[...]"
        for value, own in zip(given, taken, strict=True):
            _check_known(value, own, each)


def _name(kind: Any) -> str:
    if get_origin(kind) is None:
        return kind.__name__
    return f"{get_origin(kind).__name__} of {', '.join(_name(part) for part in get_args(kind) if part is not ...)}"
