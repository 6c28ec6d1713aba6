"""Training engines: forward passes and optimizer steps. Read `interface.py`, then `single.py`, the simplest."""
