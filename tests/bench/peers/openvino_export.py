"""A Hugging Face folder to OpenVINO's format, in OpenVINO's environment: FOLDER OUT DTYPE.

bfloat16 and float32 are one export, with weights of 32 bits: the runner's hint says what is
computed in. int8 has weights of 8 bits, one scale per output channel, symmetric.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nncf
import openvino as ov
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

FILE = "openvino_model.xml"


def main() -> None:
    folder, target, dtype = sys.argv[1:]
    main_export(folder, target, task="text-generation-with-past", ov_config=OVConfig(dtype="fp32"))
    if dtype == "int8":
        compress(Path(target))


def compress(folder: Path) -> None:
    """Replace the model in a folder, by way of another one: its weights are mapped while read."""
    made = folder / "int8"
    model = ov.Core().read_model(folder / FILE)
    nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    ov.save_model(model, made / FILE, compress_to_fp16=False)
    del model
    for file in made.iterdir():
        shutil.move(file, folder / file.name)
    made.rmdir()


if __name__ == "__main__":
    main()
