from .decode import Decode as Decode
from .decode import lowered_for_few_rows as lowered_for_few_rows
from .pipelined_contraction import PipelinedContraction as PipelinedContraction
