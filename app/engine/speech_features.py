"""Windows of a recording as a speech model's encoder takes them: the stock feature extractor, window by window.

The extractor flattens what is far below the loudest moment of what it is given. For that to be the whole recording's,
and not each window's, the loudest value is found first: `maximum(features, loudest - 2)` is then what the extractor
makes of the whole recording, but for the frames at a window's edges. Computes in the caller's thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import WhisperFeatureExtractor

from slicing.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

FLOOR = 2.0  # below the loudest: 8 powers of ten of energy, as features are scaled (logarithms by 4)


class SpeechFeatures:
    """One model's feature extractor."""

    def __init__(self, extractor: WhisperFeatureExtractor) -> None:
        self._extractor = extractor
        self.rate: int = extractor.sampling_rate  # Hz
        self.hop: int = extractor.hop_length  # samples of a frame
        self.window_frames: int = extractor.nb_max_frames

    @classmethod
    def load(cls, folder: Path) -> SpeechFeatures:
        """Read a model folder's preprocessor_config.json. Raises ModelError."""
        try:
            return cls(WhisperFeatureExtractor.from_pretrained(str(folder), local_files_only=True))
        except (OSError, TypeError, ValueError) as error:
            raise ModelError(f"{folder} holds no preprocessor_config.json of a speech model") from error

    def num_frames(self, samples: np.ndarray) -> int:
        """How many frames a recording has; what is left over is less than one."""
        return len(samples) // self.hop

    def loudest(self, samples: np.ndarray) -> float:
        """The highest value of the whole recording's features."""
        size = self.window_frames * self.hop
        pieces = (samples[begin : begin + size] for begin in range(0, max(1, len(samples)), size))
        return max(float(self._extract(piece).max()) for piece in pieces)

    def window(self, samples: np.ndarray, seek: int, loudest: float) -> torch.Tensor:
        """Return the features [1, mel bins, frames] of the window from frame `seek` on; silence follows the end."""
        begin = seek * self.hop
        piece = samples[begin : begin + self.window_frames * self.hop]
        return self._extract(piece).clamp_min(loudest - FLOOR)

    def _extract(self, samples: np.ndarray) -> torch.Tensor:
        made = self._extractor(samples, sampling_rate=self.rate, return_tensors="pt")
        features: torch.Tensor = made.input_features
        return features
