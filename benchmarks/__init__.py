"""Benchmarks: real replicas of tickd, of its two floors and of its peers, on a real Postgres, in the same run."""
