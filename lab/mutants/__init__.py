"""Mutants of generated CUDA: one place changed by rule, run in the emulator in many orders; what lives needs a reason.

:mod:`.rules` says what is changed, :mod:`.subjects` in which kernels, :mod:`.running` runs a mutant and judges it, and
:mod:`.reasons` says why those that live are harmless. Mutants whose reason is not known are harmful until someone has
looked at them: they fail ``ladder mutants``.
"""
