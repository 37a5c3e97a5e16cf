"""Data sets: sources, reading and splits of tables."""
