"""Text from the templates beside this file, and what keeps records' text from becoming markup in it.

Whatever is written as Markdown is escaped on the way, in templates and in tables alike, unless it is a
:class:`Markdown`: our own words, with values put in by ``Markdown("… {} …").format(value)``, which escapes them.
"""

from __future__ import annotations

import html
import re
from typing import Any

import jinja2
import markupsafe

LONGEST_TEXT = 6000
CONTROLS = re.compile(r"\s*[\x00-\x1f\x7f-\x9f\u2028\u2029]+\s*")
INVISIBLE = re.compile(r"[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")  # or turning text around
# What Markdown or HTML could take for structure anywhere; brackets where they are no index such as B[K,N]; underscores
# at the ends of words; and what begins a list, a heading, a rule or a link of its own.
STRUCTURE = re.compile(
    r"[&<>|`*\\~$]"
    r"|\[(?!(?<=\w\[)[\w,]+\](?![(\[]))"
    r"|(?<!\w)\]|\](?=[(\[])"
    r"|(?<![^\W_])_+|_+(?![^\W_])"
    r"|^(?:[-+](?=\s|$)|#|[-=]{2})|(?<=^\d)[.)](?=\s)|(?<=^\d\d)[.)](?=\s)"
    r"|:(?=//)|(?<=www)\."
)


def clean(text: object, longest: int = LONGEST_TEXT) -> str:
    """Return a text in one line, without characters that steer a terminal or hide, and no longer than that."""
    line = INVISIBLE.sub("", CONTROLS.sub(" ", str(text))).strip(" ")
    return line if len(line) <= longest else line[: longest - 1] + "…"


class Markdown(markupsafe.Markup):
    """Text that is Markdown already; what is joined, added or formatted into it is escaped."""

    @classmethod
    def escape(cls, value: Any) -> Markdown:
        """Write a value so that Markdown and HTML show it as it is: in one line, with entities for their signs."""
        if hasattr(value, "__html__"):
            return cls(value)
        return cls(STRUCTURE.sub(lambda found: "".join(map(_entity, found[0])), clean(value)))


def code(text: str) -> Markdown:
    """Write a text as code, whatever is in it."""
    return Markdown("<code>{}</code>").format(text)


def plain(text: str) -> str:
    """Write a text for a terminal: of Markdown, entities as the characters that they are."""
    return clean(html.unescape(text) if isinstance(text, Markdown) else text)


def _entity(character: str) -> str:
    named = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
    return named.get(character) or f"&#{ord(character)};"


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("tensorir_ladder.reports"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=True,
    finalize=Markdown.escape,  # before jinja2's own escaping, which is for HTML alone
)


def render(template: str, **values: Any) -> str:
    """Fill a template in; a name that it needs and that is not among the values is an error."""
    return str(ENVIRONMENT.get_template(template).render(values)).strip()
