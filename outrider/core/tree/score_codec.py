"""The encoding of edge scores on the wire: one byte each."""

EDGE_STEPS = 16  # code steps for each unit of an edge's natural logarithm
LARGEST_EDGE_CODE = 255


def edge_code(log_score: float) -> int:
    """Return the code (0 to 255) of an edge score's natural logarithm: minus sixteen times the logarithm, rounded."""
    return round(min(LARGEST_EDGE_CODE, max(0.0, -log_score * EDGE_STEPS)))


def edge_from_code(code: int) -> float:
    """Return the natural logarithm that a code stands for."""
    return -code / EDGE_STEPS
