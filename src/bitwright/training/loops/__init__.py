"""Other people's training loops, one file each; import the one that you need: each needs its own library."""
