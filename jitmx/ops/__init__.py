"""Operators on torch tensors, one file a family."""
