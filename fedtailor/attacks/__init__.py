"""The leakage of uploads: gradient inversion against what each method really uploads."""
