"""The images: 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Digits:
    """`images` float32 [n, 8, 8], 0 (paper) to 1 (ink); `labels` int64 [n], the digits 0 to 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load() -> tuple[Digits, Digits]:
    """Training and held-out digits: every fifth image is held out, so that each run splits alike."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / 16).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    held_out = np.arange(len(labels)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])
