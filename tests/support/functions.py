"""What tests check functions by, and ``ladder rules`` too: :mod:`lab.function_check`."""

from tensorir_ladder.lab.function_check import CheckedFunction as CheckedFunction
from tensorir_ladder.lab.function_check import WrongFunction as WrongFunction
from tensorir_ladder.lab.function_check import check_function as check_function
