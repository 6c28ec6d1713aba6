"""Runs reward functions over samples: `choice.py` makes the runner of a run.

`serial.py` calls functions in this process, `pooled.py` in processes with limits, which `processes.py` starts through
the fork server of `forkserver.py`.
"""
