"""Many runs as one piece of work: comparison, advice, reproduction, statistics."""
