"""Recording of a step: what its body does becomes tasks on partitions."""
