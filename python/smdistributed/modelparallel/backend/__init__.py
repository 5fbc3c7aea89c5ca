"""Names that launchers look for."""
