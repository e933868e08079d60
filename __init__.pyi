from .relax.compilation import compile as compile
from .relax.explanation import explain as explain
from .relax.rules.for_target import rules as rules

__version__: str
