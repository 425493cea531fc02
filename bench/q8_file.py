"""A Q8_0 GGUF file of a model that is at hand as another GGUF file: what llama.cpp is measured with.

Metadata is taken over; matrices are dequantised and rounded to 8 bits in blocks of 32, vectors stay float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Q8 = gguf.GGMLQuantizationType.Q8_0
SKIPPED = ("general.architecture", "general.file_type", "general.quantization_version", "GGUF.")


def write_q8(source: Path, target: Path) -> None:
    """Write `target`, unless it is there."""
    if target.exists():
        return
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target.with_suffix(".part"), architecture)
    for name, entry in reader.fields.items():
        if not name.startswith(SKIPPED):
            _copy(writer, name, entry)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").rename(target)


def _copy(writer: Any, name: str, entry: Any) -> None:
    kind = entry.types[0]
    if kind is gguf.GGUFValueType.ARRAY:
        writer.add_key_value(name, entry.contents(), kind, sub_type=entry.types[-1])
    else:
        writer.add_key_value(name, entry.contents(), kind)
