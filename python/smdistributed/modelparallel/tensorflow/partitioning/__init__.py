"""Assignment of layers to partitions, and the variables that a rank keeps."""
