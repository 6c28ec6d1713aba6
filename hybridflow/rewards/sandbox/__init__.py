"""Runs untrusted programs with limits and without access to other processes, files or the network.

Read `runs.py` first: it runs a program and reports how it ended. `jail.py` runs in the new process and restricts it
before it runs the program; `syscalls.py` lists the system calls that are denied. `questions.py` splits tests, so that
the values they expect stay out of that process.
"""
