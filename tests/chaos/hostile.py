"""A hostile tenant attacks a cluster in each way that is known, and eight callers of another tenant are measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from tests.chaos.hostile_callers import Finding, Report
from tests.chaos.report import quantile
from tests.chaos.servers import Forward
from tests.hostile.attacks import ATTACKS, Outcome
from tests.hostile.callers import BOUNDS, Besieged, Measured, besieged

ROUNDS = 2  # of each attack: undisturbed, attacked, undisturbed, attacked
SLOWER = 2.0  # times the undisturbed 99th percentile
MIB = 2**20


class HostileTenant:
    """All attacks against one cluster."""

    def __init__(self, report: Report, forward: Forward, seconds: float, attacks: list[str] | None = None) -> None:
        """`seconds`: of each attack, and as long without it."""
        self.findings: list[Finding] = []
        self._report = report
        self._forward = forward
        self._seconds = seconds
        self._attacks = attacks or list(ATTACKS)
        self._memory: dict[str, list[int]] = defaultdict(list)  # by process: idle, at most, after all

    async def run(self) -> None:
        """Fill `findings`."""
        async with besieged(self._forward) as target:
            await target.undisturbed(2.0)
            self._most((await target.undisturbed(2.0)).memory)
            for name in self._attacks:
                await self._one(target, name)
            after = (await target.undisturbed(2.0)).memory
        for process, bound in BOUNDS.items():
            idle, most = self._memory[process][0], max(self._memory[process])
            measured = f"{idle // MIB} idle, {most // MIB} at most, {after.get(process, 0) // MIB} after it, MiB"
            self._found(f"memory of {process}", measured, f"{bound // MIB} MiB", most <= bound)

    async def _one(self, target: Besieged, name: str) -> None:
        quiet, attacked = Measured(), Measured()
        codes: Counter[str] = Counter()
        leaks: list[str] = []
        begun, attacker_s = 0, 0.0
        for _ in range(ROUNDS):
            _add(quiet, await target.undisturbed(self._seconds / ROUNDS))
            measured, outcome = await target.attack(name, self._seconds / ROUNDS)
            _add(attacked, measured)
            codes.update(outcome.codes)
            leaks += outcome.leaks
            begun += outcome.begun
            attacker_s += outcome.processor_s
        self._most(attacked.memory)
        self._describe(name, attacked, Outcome(dict(codes), begun, 0, leaks, attacker_s))
        before, during = _p99(quiet), _p99(attacked)
        middles = [median(measured.first_tokens) for measured in (quiet, attacked)]
        self._found(
            f"first token, {name}: p99 of {len(attacked.first_tokens)}, undisturbed and attacked",
            f"{before:.3f} s, {during:.3f} s; medians {middles[0]:.3f} s, {middles[1]:.3f} s",
            f"{SLOWER:g} times",
            during <= SLOWER * before,
        )
        failures = [*quiet.failures, *attacked.failures]
        for failure in failures[:3]:
            self._report(f"{name}: {failure}")
        self._found(f"answers, {name}", f"{len(failures)} disturbed", "none", not failures)
        self._found(f"read of the other tenant, {name}", ", ".join(leaks) or "nothing", "nothing", not leaks)

    def _describe(self, name: str, attacked: Measured, outcome: Outcome) -> None:
        busy = ", ".join(f"{process} {spent:.1f}" for process, spent in attacked.processor_s.items())
        self._report(f"{name}: {outcome.begun} calls; {', '.join(f'{code}: {n}' for code, n in outcome.codes.items())}")
        self._report(f"{name}: seconds of a processor: attacker {outcome.processor_s:.1f}, {busy}")

    def _most(self, memory: dict[str, int]) -> None:
        for process, size in memory.items():
            self._memory[process].append(size)

    def _found(self, what: str, measured: str, bound: str, met: bool) -> None:
        self.findings.append(Finding(what, measured, bound, met))
        self._report(f"{what}: {measured} (bound: {bound}){'' if met else '  NOT MET'}")


def last_line_of_attacks(findings: list[Finding]) -> str:
    """The line that scripts read."""
    return f"hostile: findings={len(findings)} not_met={sum(not finding.met for finding in findings)}"


def _p99(measured: Measured) -> float:
    return quantile(sorted(measured.first_tokens), 0.99)


def _add(total: Measured, more: Measured) -> None:
    total.first_tokens += more.first_tokens
    total.failures += more.failures
    for process, size in more.memory.items():
        total.memory[process] = max(total.memory.get(process, 0), size)
    for process, spent in more.processor_s.items():
        total.processor_s[process] = total.processor_s.get(process, 0.0) + spent
