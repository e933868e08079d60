"""The commands of ``ladder`` that test the project itself, as :mod:`harness.commands` describes one."""
