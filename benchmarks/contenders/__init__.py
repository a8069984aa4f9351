"""Contenders: each module is the program of one replica, run as `python -m benchmarks.contenders.NAME`."""
