"""Models and training loops that tests of `smdistributed.modelparallel.torch` share, on CPUs and GPUs."""
