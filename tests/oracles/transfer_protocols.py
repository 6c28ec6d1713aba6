"""Table 3 of the HybridFlow paper, literally: six protocols, by loops over the ranks of p-t-d training groups.

Global rank r = tau + t * pi + p * t * delta. `3D_ALL_MICRO_DP` follows sec. 5.1: a chunk for each replica.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Pipeline, tensor and data sizes for training; pipeline and tensor sizes for generation."""

    p: int
    t: int
    d: int
    p_g: int
    t_g: int

    @property
    def ranks(self) -> list[tuple[int, int, int]]:
        """(delta, pi, tau) of every rank, in rank order."""
        return [(delta, pi, tau) for delta in range(self.d) for pi in range(self.p) for tau in range(self.t)]


def distribution(name: str, layout: Layout) -> list[int]:
    """Which chunk each rank receives; 0 for all where the batch is not divided."""
    chunks = []
    for rank, (delta, pi, tau) in enumerate(layout.ranks):
        if name in ("ONE_TO_ALL", "3D_PP_ONLY"):
            chunks.append(0)
        elif name == "3D_PROTO":
            chunks.append(delta)
        elif name in ("DP_PROTO", "ALL_TO_ALL"):
            chunks.append(rank)
        else:
            slots_p, slots_t = layout.p // layout.p_g, layout.t // layout.t_g
            m = (pi % slots_p) * slots_t + (tau % slots_t)
            chunks.append(delta * slots_p * slots_t + m)
    return chunks


def collection(name: str, layout: Layout) -> list[int]:
    """Ranks that answer, in the order their answers are put together."""
    found = []
    for rank, (delta, pi, tau) in enumerate(layout.ranks):
        slots_p, slots_t = layout.p // layout.p_g, layout.t // layout.t_g
        answers = {
            "ONE_TO_ALL": True,
            "DP_PROTO": True,
            "ALL_TO_ALL": True,
            "3D_PROTO": pi == layout.p - 1 and tau == 0,
            "3D_PP_ONLY": tau == 0 and delta == 0,
            "3D_ALL_MICRO_DP": pi // slots_p == layout.p_g - 1 and tau // slots_t == 0,
        }
        if answers[name]:
            found.append(rank)
    chunks = distribution(name, layout)
    return sorted(found, key=lambda rank: (chunks[rank], rank))
