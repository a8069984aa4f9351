"""tickd: one tick of one graph has one writer, on however many replicas."""
