"""Who may connect to whom: the graph that the network policies allow, computed as Kubernetes would, is DESIGN's own."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

import pytest

from tests.deploy.manifests import OVERLAYS, ROLES, Manifest, of_kind, pods, rendered, selects

HERE = {"kubernetes.io/metadata.name": "outrider"}
Edge = tuple[str, str, int]


class Peer(NamedTuple):
    """Something that has an address."""

    name: str
    labels: dict[str, str]
    namespace: dict[str, str]
    ports: dict[str, int]
    address: str = "192.0.2.1"

    @property
    def governed(self) -> bool:
        return self.namespace == HERE


NAMESPACE = "kubernetes.io/metadata.name"
DNS = "dns.operator.openshift.io/daemonset-dns"
STRANGERS = [
    Peer("client", {}, {NAMESPACE: "apps", "outrider-client": "true"}, {}),
    Peer("prometheus", {"app.kubernetes.io/name": "prometheus"}, {NAMESPACE: "monitoring"}, {}),
    Peer("traces", {}, {NAMESPACE: "monitoring"}, {"otlp": 4317, "http": 80}),
    Peer("names", {"k8s-app": "kube-dns"}, {NAMESPACE: "kube-system"}, {"dns": 53}),
    Peer("names on the node", {}, {}, {"dns": 53}, "169.254.20.10"),
    Peer("OpenShift's names", {DNS: "default"}, {NAMESPACE: "openshift-dns"}, {"dns": 5353}),
    Peer("beside", {}, HERE, {"http": 80}),
    Peer("elsewhere", {}, {NAMESPACE: "default"}, {"http": 80}),
]

CORE: set[Edge] = {
    ("client", "gateway", 8000),
    ("client", "router", 7070),
    ("gateway", "router", 7070),
    ("router", "verifier", 7071),
    ("router", "drafter", 7072),
    ("drafter", "verifier", 7071),
    ("drafter", "drafter", 7072),  # tiers
    *((role, "redis", 6379) for role in ("router", "verifier", "drafter")),
}
WATCHED: set[Edge] = {
    *(("prometheus", role, 9464) for role in ROLES),
    *((role, "collector", 4317) for role in ROLES),
    ("collector", "traces", 4317),
}
RANKS: set[Edge] = {("verifier", "verifier", port) for port in (6379, 6380, 7071, 7079, 9464)}
EXPECTED = {
    "cpu-demo": CORE,
    "learning": CORE | {("trainer", "redis", 6379)},
    "observability": CORE | WATCHED,
    "gpu": CORE | WATCHED | RANKS,
    "kuberay": CORE | WATCHED | RANKS,
}


def graph(manifests: list[Manifest]) -> set[Edge]:
    """Every connection that is allowed: from whom, to whom, to which port. Names of hosts are asked for by all."""
    policies = [it["spec"] for it in of_kind(manifests, "NetworkPolicy").values()]
    peers = [*STRANGERS, *(Peer(pod.component, pod.labels, HERE, pod.ports) for pod in pods(manifests))]
    found = set()
    for source in peers:
        for target in peers:
            if source.governed or target.governed:
                found |= {
                    (source.name, target.name, port)
                    for port in target.ports.values()
                    if _allowed(policies, "egress", "to", source, target, target, port)
                    and _allowed(policies, "ingress", "from", target, source, target, port)
                }
    asks = {
        (peer.name, names.name, port)
        for peer in peers
        for names in STRANGERS
        for port in names.ports.values()
        if peer.governed and "names" in names.name
    }
    assert asks <= found
    return found - asks


def _allowed(
    policies: list[Manifest], way: str, end: str, governed: Peer, other: Peer, target: Peer, port: int
) -> bool:
    """By one of its two ends' policies; who has none for this way may do all."""
    if not governed.governed:
        return True
    rules = [
        policy.get(way, [])
        for policy in policies
        if selects(policy["podSelector"], governed.labels) and way.capitalize() in policy["policyTypes"]
    ]
    return not rules or any(_fits(rule, end, other, target, port) for own in rules for rule in own)


def _fits(rule: Manifest, end: str, other: Peer, target: Peer, port: int) -> bool:
    ports: list[Any] = [it["port"] for it in rule.get("ports", [])]
    if ports and port not in {target.ports.get(it) if isinstance(it, str) else it for it in ports}:
        return False
    return end not in rule or any(_is(peer, other) for peer in rule[end])


def _is(peer: Manifest, other: Peer) -> bool:
    if "ipBlock" in peer:
        return ip_address(other.address) in ip_network(peer["ipBlock"]["cidr"])
    near = selects(peer["namespaceSelector"], other.namespace) if "namespaceSelector" in peer else other.governed
    return near and ("podSelector" not in peer or selects(peer["podSelector"], other.labels))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_allowed_connections_are_exactly_those_of_the_design(overlay: str) -> None:
    assert graph(rendered(overlay)) == EXPECTED[overlay]


def test_an_arrow_that_is_allowed_at_one_end_alone_is_not_allowed() -> None:
    demo = rendered("cpu-demo")
    for name, lost in (("redis", 3), ("to-redis", 3), ("gateway", 2)):
        without = [it for it in demo if it["metadata"]["name"] != name or it["kind"] != "NetworkPolicy"]
        assert len(CORE - graph(without)) == lost


def test_a_network_without_policies_admits_strangers() -> None:
    nothing = [it for it in rendered("cpu-demo") if it["kind"] != "NetworkPolicy"]
    assert ("elsewhere", "redis", 6379) in graph(nothing)
