"""Tree constructions: which nodes a drafter expands next, and which children it sends.

A construction decides only the shape. The candidate tokens of a node and their fitted probabilities, which depend on
the noise where the rule shares it, are the same for all constructions.
"""

from outrider.core.construction.by_score import BestFirst, Eagle2, OptTree
from outrider.core.construction.construction import Construction, TreeTerms
from outrider.core.construction.offline import grow
from outrider.core.construction.static import Chain, KAry, Sequoia, StaticConstruction
from outrider.errors import ConfigError

__all__ = [
    "CONSTRUCTIONS",
    "BestFirst",
    "Chain",
    "Construction",
    "Eagle2",
    "KAry",
    "OptTree",
    "Sequoia",
    "StaticConstruction",
    "TreeTerms",
    "construction_of",
    "grow",
    "static_construction_of",
]

_ALL: tuple[Construction, ...] = (BestFirst(), OptTree(), Eagle2(), Chain(), KAry(), Sequoia())
_BY_NAME = {construction.name: construction for construction in _ALL}
CONSTRUCTIONS = tuple(_BY_NAME)  # names; the first is the default


def construction_of(name: str) -> Construction:
    """Return the construction of that name. Raises ConfigError when there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ConfigError(f"tree: there is no construction {name!r}; there are {', '.join(CONSTRUCTIONS)}") from None


def static_construction_of(name: str) -> StaticConstruction:
    """Return the construction to use where the shape must not depend on the draws: the named one if it is static, else
    Sequoia. Raises ConfigError when there is none of that name."""
    found = construction_of(name)
    return found if isinstance(found, StaticConstruction) else Sequoia()
