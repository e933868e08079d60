from .schedules.rules.explanation import explain as explain
from .schedules.rules.for_target import rules as rules

__version__: str
