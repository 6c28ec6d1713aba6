"""The `hybridflow` command: everything other than training. Read `main.py` first; each command has its own file."""
