"""What every plan keeps to, whichever compiled loop looks for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dejavu.plans.stage_costs import Floats


class Rules(NamedTuple):
    """A limit, what stages need and what crosses the cuts.

    Letters as in `shared.suffix_table`: L1 = cut positions, J = levels of stages after a cut, A = link classes.

    Attributes:
        limit: seconds that no stage and no link may be busier than.
        need_J: microbatches in flight of a stage with j stages after it.
        transfer_L1AA, link_busy_L1AA: [cut, a, b] seconds across the cut between two classes, and (B − 1) times that.
    """

    limit: float
    need_J: NDArray[np.int64]
    transfer_L1AA: Floats
    link_busy_L1AA: Floats
