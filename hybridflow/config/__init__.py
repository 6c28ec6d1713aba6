"""What a run is, as data: dataclasses, without torch and without Ray. Read `experiment.py` first."""
