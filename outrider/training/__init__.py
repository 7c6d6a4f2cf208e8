"""Training of drafters and heads: from a target, and from text like the text that it will generate."""
