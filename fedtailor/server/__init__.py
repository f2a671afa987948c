"""The round loop: participation, messages and their bytes, evaluation, checkpoints, the run record."""
