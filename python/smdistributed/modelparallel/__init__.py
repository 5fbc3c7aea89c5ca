"""Model parallel training. Import ``smdistributed.modelparallel.torch``; this package imports no framework."""

#: The version of the documented API that this package follows; libraries compare it.
__version__ = "1.15.0"
