"""The configuration of a run as dataclasses, without torch or Ray. Read `experiment.py` first."""
