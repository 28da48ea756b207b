"""Measurements against peers, pair by pair in one process; results are ratios, never absolute times."""
