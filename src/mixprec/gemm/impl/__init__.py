"""Implementations of the product; none imports another."""
