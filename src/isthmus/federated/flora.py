"""FLoRA (Wang et al., NeurIPS 2024): the server stacks the clients' factors, so the mean of the products is exact, and merges them.

Every round starts with fresh factors of the client's own rank on the merged base, so ranks may differ and never grow; what was
merged is part of the model, is saved with it and comes back with it.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.types import Method
from ..parts.aggregate import IntoBase
from ..parts.apply import Restart
from ..parts.send import Stacks


def flora(base: Method) -> Method:
    """FLoRA: stack the clients' factors, exact, and merge them into the base; downlink the whole stack."""
    return replace(base, aggregate=IntoBase(), apply=Restart(), send=Stacks(restart=True))
