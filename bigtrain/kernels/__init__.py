"""Faster or leaner computation of parts of a model, with the same result."""
