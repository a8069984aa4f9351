"""Prices: each module is the program that measures the pieces of one contender, run as `python -m benchmarks.prices.NAME ROUNDS`."""
