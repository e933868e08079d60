from . import errors as errors
from .call import describe as describe
from .call import matmul as matmul
