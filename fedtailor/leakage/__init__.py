"""What uploads tell: gradient inversion against what each method really uploads."""
