"""A simulation of a cluster with the real controllers, to compare policies and to plan hardware.

The policy, the verifier's choice of nodes, its hold policy and its selection of the overlap mode are the code of a
running cluster; machines, networks and the target's agreement with drafts are modelled (`deployment`).
"""
