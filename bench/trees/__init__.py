"""`python -m bench.trees`: measures the acceptance length of tree constructions, for each rule and drafter."""
