"""Tasks of other launchers. Each starts a host server that connects to the notebook."""
