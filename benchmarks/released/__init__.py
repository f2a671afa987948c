"""Released implementations beside ours, on the same samples: see `benchmarks.released.__main__`."""
