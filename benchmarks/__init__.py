"""What fedtailor costs, measured side by side with plain PyTorch: `make bench`."""
