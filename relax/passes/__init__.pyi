from .compute_in_float32 import ComputeInFloat32 as ComputeInFloat32
from .fold_constants import FoldConstants as FoldConstants
from .join_functions import DequantizeInProduct as DequantizeInProduct
from .join_functions import WidenInRows as WidenInRows
from .legalize_scans import LegalizeScans as LegalizeScans
from .read_transposed import ReadTransposed as ReadTransposed
from .recognise_norms import RecogniseNorms as RecogniseNorms
from .simplify_shapes import SimplifyShapes as SimplifyShapes
