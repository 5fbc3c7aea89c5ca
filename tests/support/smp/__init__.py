"""Models and trainings that tests of `smdistributed.modelparallel.torch` share, on CPUs and on GPUs."""
