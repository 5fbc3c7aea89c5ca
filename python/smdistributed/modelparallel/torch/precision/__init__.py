"""Mixed precision: 16-bit models with float32 master weights and loss scales."""
