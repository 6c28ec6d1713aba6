"""Rules on the plan of a run (in `parallelism.py`, on the configuration alone). Each yields all its findings."""
