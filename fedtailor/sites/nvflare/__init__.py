"""NVIDIA FLARE as the carrier of letters: its job, the processes around it, and the driver that sees a run through."""
