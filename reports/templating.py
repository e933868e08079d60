"""Text from the templates beside this file."""

from __future__ import annotations

from typing import Any

import jinja2

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("tensorir_ladder.reports"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # Markdown
)


def render(template: str, **values: Any) -> str:
    """Fill a template in; a name that it needs and that is not among the values is an error."""
    return ENVIRONMENT.get_template(template).render(values).strip()
