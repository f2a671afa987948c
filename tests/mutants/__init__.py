"""Faults that tests must find: the list (`faults.py`) and the command that tries them (`python -m tests.mutants`)."""
