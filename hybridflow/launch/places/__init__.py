"""Submits a run to a place: `hybridflow launch`. Read `place.py` and `job.py`, then one file per place.

`place.py` has the settings of a place, `job.py` what a place must know of a run, and `submission.py` chooses between
the places. Each place turns both into a `Submission`: a text, and the program that takes it.
"""
