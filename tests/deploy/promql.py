"""What a query of Prometheus asks for, held against what there is: metrics, their kinds, and labels all the way up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import promql_parser as promql

RATES = {"rate", "irate", "increase"}
OVER_TIME = {"min_over_time", "max_over_time", "avg_over_time"}
SCRAPED = frozenset({"job", "instance"})  # Prometheus' own


@dataclass(frozen=True)
class Series:
    """The series that have one name."""

    counts: bool  # only ever up, so that its rate means something
    labels: frozenset[str]


@dataclass
class Checker:
    """Checks queries against known series, and remembers which they asked for."""

    series: Mapping[str, Series]
    values: Mapping[str, frozenset[str]]  # of labels that have but few
    asked: set[str] = field(default_factory=set)

    def labels(self, query: str) -> frozenset[str]:
        """The labels of a query's result. AssertionError where the query cannot mean anything."""
        return self._of(promql.parse(query.replace("$__rate_interval", "5m"))) or frozenset()

    def _of(self, at: promql.Expr) -> frozenset[str] | None:
        """The labels of an expression's result; None for a number."""
        match at:
            case promql.NumberLiteral():
                return None
            case promql.ParenExpr() | promql.UnaryExpr():
                return self._of(at.expr)
            case promql.VectorSelector():
                return self._selected(at)
            case promql.MatrixSelector():
                return self._selected(at.vector_selector)
            case promql.Call():
                return self._called(at)
            case promql.AggregateExpr():
                return self._aggregated(at)
            case promql.BinaryExpr():
                return self._joined(at)
        raise AssertionError(f"{type(at).__name__}: teach the checker what it does")

    def _selected(self, at: promql.VectorSelector) -> frozenset[str]:
        assert at.name in self.series, f"there is no metric {at.name}"
        self.asked.add(at.name)
        known = self.series[at.name].labels
        for matcher in at.matchers.matchers:
            assert matcher.name in known, f"{at.name} has no label {matcher.name}"
            if matcher.name in self.values and "$" not in matcher.value:
                unknown = set(matcher.value.split("|")) - self.values[matcher.name]
                assert not unknown, f"{matcher.name} is never {unknown}"
        return known

    def _called(self, at: promql.Call) -> frozenset[str] | None:
        if at.func.name == "time":
            return None
        name, argument = at.func.name, at.args[-1]
        within = self._of(argument)
        assert within is not None, name
        if name == "histogram_quantile":
            assert "le" in within, f"a quantile needs le: {argument}"
            return within - {"le"}
        assert isinstance(argument, promql.MatrixSelector), f"{name} of no range: {argument}"
        assert name in RATES | OVER_TIME, name
        counts = self.series[argument.vector_selector.name].counts
        assert counts == (name in RATES), f"{name} of {argument.vector_selector.name}"
        return within

    def _aggregated(self, at: promql.AggregateExpr) -> frozenset[str]:
        within, kept = self._of(at.expr), frozenset(at.modifier.labels) if at.modifier else frozenset()
        assert within is not None
        assert kept <= within, f"{kept - within}: no label of {at.expr}"
        without = at.modifier is not None and at.modifier.type == promql.AggModifierType.Without
        return within - kept if without else kept

    def _joined(self, at: promql.BinaryExpr) -> frozenset[str] | None:
        left, right = self._of(at.lhs), self._of(at.rhs)
        assert at.modifier is None or at.modifier.matching is None, f"teach the checker: {at}"
        assert left is None or right is None or left == right, f"never match: {left} and {right}, of {at}"
        return right if left is None else left
