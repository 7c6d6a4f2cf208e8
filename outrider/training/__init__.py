"""Drafters are made here: from a target, and from text like that which it will say."""
