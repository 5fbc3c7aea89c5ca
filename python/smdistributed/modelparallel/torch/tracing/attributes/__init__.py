"""Attributes of modules, and the objects in them, as a step's body and calls change them."""
