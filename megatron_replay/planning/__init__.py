"""Memory, time and traffic of a run from formulas, and the dry run. Nothing here starts a process group."""
