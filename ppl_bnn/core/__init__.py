"""Utilities of all other rooms: errors, checks, files, processes and progress."""
