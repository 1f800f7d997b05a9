"""Runtimes that execute artefacts, one file or package each."""
