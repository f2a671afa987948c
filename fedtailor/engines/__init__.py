"""Engines: where clients run (in process, workers, Ray, in memory), and the run itself: prepare, run, resume, join."""
