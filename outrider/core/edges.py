"""Edge scores as the wire carries them."""

EDGE_STEPS = 16  # steps of an edge's natural logarithm
LARGEST_EDGE_CODE = 255


def edge_code(log_score: float) -> int:
    """An edge score as one byte: minus sixteen times its logarithm."""
    return round(min(LARGEST_EDGE_CODE, max(0.0, -log_score * EDGE_STEPS)))


def edge_from_code(code: int) -> float:
    """The logarithm that a code stands for."""
    return -code / EDGE_STEPS
