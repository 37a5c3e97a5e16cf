"""What every other room rests on: errors, checks, files, processes and progress."""
