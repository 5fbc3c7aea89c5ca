"""Assignment of modules to partitions, and the parameters that a rank keeps."""
