"""The images: 1,797 handwritten digits of 8 x 8 pixels, beside this file.

"Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), from the UCI Machine Learning
Repository under CC BY 4.0: its test set, as `images` uint8 [n, 8, 8] of 0 to 16, and `labels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Digits:
    """`images` float32 [n, 8, 8], 0 (paper) to 1 (ink); `labels` int64 [n], the digits 0 to 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load() -> tuple[Digits, Digits]:
    """Training and held-out digits: every fifth image is held out, so that each run splits alike."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images = (file["images"] / 16).astype(np.float32)
        labels = file["labels"].astype(np.int64)
    held_out = np.arange(len(labels)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])
