"""Tree constructions: which nodes are expanded next, and which children are told.

A construction decides the shape alone. Which tokens a node's candidates are and what each one's chance is, fitted and
shaped by the noise where the rule shares it, is the same for all of them.
"""

from outrider.core.construction.construction import Construction, Terms
from outrider.core.construction.growing import grow
from outrider.core.construction.shaped import Chain, KAry, Sequoia, Shaped
from outrider.core.construction.valued import BestFirst, Eagle2, OptTree
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
    "Shaped",
    "Terms",
    "construction_of",
    "grow",
    "shaped_of",
]

_ALL: tuple[Construction, ...] = (BestFirst(), OptTree(), Eagle2(), Chain(), KAry(), Sequoia())
_BY_NAME = {construction.name: construction for construction in _ALL}
CONSTRUCTIONS = tuple(_BY_NAME)  # names; the first is the default


def construction_of(name: str) -> Construction:
    """The construction of that name. Raises ConfigError when there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ConfigError(f"tree: there is no construction {name!r}; there are {', '.join(CONSTRUCTIONS)}") from None


def shaped_of(name: str) -> Shaped:
    """What stands in for a construction where the shape must not depend on what was drawn: itself if it does not,
    else Sequoia's. Raises ConfigError when there is none of that name."""
    found = construction_of(name)
    return found if isinstance(found, Shaped) else Sequoia()
