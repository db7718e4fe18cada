"""Tasks of other launchers, each of which starts a host server that calls the notebook."""
