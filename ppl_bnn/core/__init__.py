"""Common utilities: errors, checks, files, processes and progress."""
