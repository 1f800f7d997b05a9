"""deploy.runtimes."""
