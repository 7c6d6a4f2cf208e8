"""`python -m bench.trees`: how many tokens each tree construction gets accepted, under each rule, by each drafter."""
