from .kernels.host_launch import link_kernels as link_kernels
from .kernels.relax import with_kernels_of_steps as with_kernels_of_steps
from .kernels.relax_attention import FuseAttention as FuseAttention
from .schedules.rules.explanation import explain as explain
from .schedules.rules.for_target import rules as rules

__version__: str
