"""Environments and tools written for other systems, recognized by their methods; none of these systems is imported.

`factory.py` lists them. Each file makes an environment with `reset` and `step`, or a coroutine, of what it recognizes.
"""
