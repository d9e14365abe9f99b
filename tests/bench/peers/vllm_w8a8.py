"""A Hugging Face folder to a checkpoint in int8 for vLLM, in vLLM's environment: FOLDER OUT.

Format "compressed-tensors", W8A8: the projections' weights have 8 bits and a scale per output
channel, activations are quantised per token as they come. Embedding and head stay as they are.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}


def quantized(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of [-127, 127] and a scale for each output channel."""
    scale_N1 = weight_NK.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (weight_NK.float() / scale_N1).round().to(torch.int8), scale_N1


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.endswith(PROJECTIONS):
                tensors[name], tensors[f"{name}_scale"] = quantized(tensor)
            else:
                tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "quantization_config": QUANTIZATION}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for file in folder.glob("*.json"):
        if file.name != "config.json":
            shutil.copy(file, target)


if __name__ == "__main__":
    main()
