"""Commands of verl, TRL and OpenRLHF as commands of hybridflow: `hybridflow translate`.

Read `translation.py` first. The names and values of single settings are in `assets/other_names.yaml`; what several
settings determine together is in `verl.py`, `trl.py` and `openrlhf.py`. `shell.py` reads scripts, and `commands.py`
finds the commands in them.
"""
