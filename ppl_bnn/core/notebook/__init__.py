"""What a notebook shows: results as HTML, and progress."""
