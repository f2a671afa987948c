"""What a client computes with: network, layout, descent, optimiser, metrics, and the `Client` that a method sees."""
