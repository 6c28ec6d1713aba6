"""Submits a run to a target: `hybridflow launch`. Read `target.py` and `job.py`, then one file per target.

`target.py` has the settings of a target, `job.py` what a target must know of a run, and `submission.py` chooses between
the targets. Each target turns both into a `Submission`: a text, and the program that takes it.
"""
