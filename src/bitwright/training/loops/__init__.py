"""Callbacks for other training loops, one file each; each requires its own library."""
