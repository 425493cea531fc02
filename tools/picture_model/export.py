"""Write a training state as a pipeline folder: `python -m tools.picture_model.export STATE.pt FOLDER`.

Needs nothing but diffusers to be opened: stock classes, half-precision safetensors, the averaged weights.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import PixArtAlphaPipeline

from tools.picture_model.parts import build_identity_vae, build_noise_scheduler, build_tokenizer
from tools.picture_model.train import PictureModel


def export(state_file: Path, folder: Path) -> None:
    """Save the averaged weights of `state_file` as a `PixArtAlphaPipeline`. What else lies in `folder` stays."""
    model = PictureModel()
    model.load_state_dict(torch.load(state_file, weights_only=True)["averaged"])
    pipeline = PixArtAlphaPipeline(
        build_tokenizer(),
        model.text_encoder.half(),
        build_identity_vae().half(),
        model.transformer.half(),
        build_noise_scheduler(),
    )
    pipeline.save_pretrained(folder)
    _amend(
        folder / "text_encoder" / "config.json", {"dtype": "float32"}
    )  # else it alone is opened in half precision
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)
    _amend(folder / "transformer" / "config.json", {"_name_or_path": None})
    _amend(folder / "vae" / "config.json", {"_name_or_path": None})


def _amend(file: Path, changes: dict[str, str | None]) -> None:
    """Set keys of a JSON file; `None` takes a key out."""
    kept = {**json.loads(file.read_text()), **changes}
    file.write_text(
        json.dumps({key: value for key, value in kept.items() if value is not None}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    export(arguments.state, arguments.folder)


if __name__ == "__main__":
    main()
