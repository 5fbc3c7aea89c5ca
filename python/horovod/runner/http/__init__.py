"""A key-value store over HTTP for the members of a job."""
