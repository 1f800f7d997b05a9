"""Pages that need nothing else: the pieces that they are made of, and the sections of a report."""
