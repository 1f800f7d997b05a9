"""Observers: find the range of a site. One file each, loaded by name from the registry."""
