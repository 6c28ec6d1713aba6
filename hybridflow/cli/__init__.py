"""The `hybridflow` command: what is done with runs beside training. Read `main.py` first; one file a command."""
