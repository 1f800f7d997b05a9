"""The arithmetic at one site: one file each, found by name through the registry."""
