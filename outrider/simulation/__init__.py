"""A model of a cluster in which the real controllers run, to compare policies and to size what is to be bought.

The policy, the verifier's choice of nodes, its patience and its contest between ways of drafting are the very code of
a running cluster; machines, networks and what the target agrees with are modelled (`deployment`).
"""
