"""Mutation testing: the product is broken on purpose, a little at a time, and the tests have to find it out."""
