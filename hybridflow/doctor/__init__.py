"""Examines this machine, or the directory of a run, and says what to do: the work of `hybridflow doctor`.

Read `finding.py` and `check.py` first. `checks/` has one file per kind of check of this machine; each check runs in a
process of its own (`examination.py`, `child.py`), so that a broken package or a hanging driver ends only that check.
`run/` has one file per kind of trace that a run leaves in its directory. No file imports torch or Ray at the top.
"""
