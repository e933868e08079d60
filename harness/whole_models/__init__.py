"""Whole models, as TVM's users have them: built by each set of schedule rules, checked, and timed beside torch.

:mod:`.definitions` says what the models are, :mod:`.reference` what they must give and how far off each element may be,
:mod:`.building` makes them by a set of rules, :mod:`.execution` runs them, :mod:`.eager` has torch's forms, and
:mod:`.timing` takes the times.
"""
