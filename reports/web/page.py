"""Pages and files of the site, and how a page becomes HTML: one template each, everything from elsewhere escaped."""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from markupsafe import Markup, escape

from tensorir_ladder.harness.commands.values import UsageError
from tensorir_ladder.reports.templating import Markdown
from tensorir_ladder.reports.web.extra import needed

SECTIONS = ("Overview", "Lessons", "Compare", "Stages", "Shapes", "Models")  # in the order of the navigation
LANGUAGES = {"schedule": "python", "tir": "python", "lowered": "python", "cuda": "cuda", "ptx": "ptx", "sass": "text"}


@dataclass(frozen=True)
class Page:
    """One HTML file of the site.

    ``address`` is relative to the site's folder, "lessons/step5.html". ``template`` lies in reports/templates/web and
    extends base.html.j2; ``values`` fill it in. ``section`` is one of :data:`SECTIONS`, or "" for a page that the
    navigation does not lead to; a section's first page is where its link goes. ``scripts`` and ``styles`` are files of
    the site that the page loads besides its own, such as "static/compare.js". ``picks_gpu``: the page shows one GPU at
    a time, chosen at its top. ``description`` says in a sentence what the page is.
    """

    address: str
    title: str
    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    section: str = ""
    scripts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()
    picks_gpu: bool = True
    description: str = ""


@dataclass(frozen=True)
class File:
    """Any other file of the site: a page's data, or something to download."""

    address: str
    text: str | bytes


def render(page: Page, pages: Sequence[Page], gpus: Mapping[str, str]) -> str:
    """Fill a page's template in; ``pages`` are all there are, ``gpus`` names by the slug that addresses have.

    Templates may call ``url(address)`` for a link from this page to a file of the site, and ``has(address)``, which
    tells if there is such a page. A name that a template needs and that is missing is an error.
    """
    addresses = {other.address for other in pages}
    firsts = {section: next((p for p in pages if p.section == section), None) for section in SECTIONS}
    own = {
        "page": page,
        "navigation": [(section, first.address) for section, first in firsts.items() if first],
        "gpus": gpus,
        "url": functools.partial(relative, page.address),
        "has": addresses.__contains__,
    }
    return environment().get_template(page.template).render({**page.values, **own}) + "\n"


def relative(source: str, target: str) -> str:
    """Write a link from one address of the site to another, which may have a fragment: both relative to its folder."""
    path, mark, fragment = target.partition("#")
    return posixpath.relpath(path, posixpath.dirname(source) or ".") + mark + fragment


def check_addresses(items: Collection[Page | File]) -> None:
    """Raise UsageError for an address that leaves the site's folder, or that two files have."""
    found: set[str] = set()
    for item in items:
        parts = item.address.split("/")
        if not all(part.strip(".") and part == posixpath.basename(part) for part in parts) or "\\" in item.address:
            raise UsageError(f"{item.address!r} is no address inside the site; write it as lessons/step5.html")
        if item.address in found:
            raise UsageError(f"two files of the site have the address {item.address}; give one another")
        found.add(item.address)


@functools.cache
def environment() -> jinja2.Environment:
    """Make the environment of the site's templates, which escapes whatever is no markup of ours."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("tensorir_ladder.reports", "templates/web"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    made.filters |= {"inline": inline, "prose": prose, "highlight": highlight}
    return made


def inline(value: Any) -> Markup:
    """Write a cell or a sentence as HTML: our own :class:`Markdown` as such, all else escaped."""
    if not isinstance(value, Markdown):
        return escape(value)
    return Markup(_markdown().renderInline(str(value)))  # values in a Markdown are escaped already


def prose(value: Markdown) -> Markup:
    """Write paragraphs of our own Markdown as HTML."""
    return Markup(_markdown().render(str(value)))


def highlight(text: str, language: str = "python") -> Markup:
    """Colour a program's text, without lines around it: of "schedule", "tir", "cuda", …, or as Pygments names it.

    The element is ``<pre class="code">``, which scrolls by itself and can be focused to do so by keyboard.
    """
    pygments = needed("pygments")
    lexer = needed("pygments.lexers").get_lexer_by_name(LANGUAGES.get(language, language), stripnl=False)
    coloured = pygments.highlight(text, lexer, needed("pygments.formatters").HtmlFormatter(nowrap=True))
    return Markup('<pre class="code" tabindex="0"><code>{}</code></pre>').format(Markup(coloured))


@functools.cache
def _markdown() -> Any:
    return needed("markdown_it").MarkdownIt("commonmark", {"html": True}).enable("table")
