"""Torture: many workers and applications on one database and store, killed, frozen and cut off at any moment.

`make torture SECONDS=60`, or `python -m tests.torture --help`. `run.py` tells what happens in what order; `memory.py`
knows what every source must be, and is the judge of what was lost.
"""
