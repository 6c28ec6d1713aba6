"""Predicts seconds of what a role does, in tens of microseconds per call: a search asks tens of thousands of times.

Three numbers of a device are fitted (`devices.Efficiency`) and, if it is calibrated, the launch seconds of each engine;
all others are sizes, published rates, and conventions that the functions state. In the order in which to read it:
`rates.py` (what collectives cost), `work.py` (the work of a forward pass), `training.py`, `decoding.py` (how a batch
shrinks while it is generated), `generation.py`, `calls.py` (a call of any kind), and `transfers.py`.
"""
