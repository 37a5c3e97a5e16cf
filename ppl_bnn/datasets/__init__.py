"""Tables: where they come from, how they are read and split."""
