"""Names that Amazon's launchers import."""
