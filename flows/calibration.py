"""Where calibrations are kept: CACHE/calibrations/KEY.json, one for each machine, model and dtype.

A file that cannot be read as a calibration is as good as none: the reason is logged, and the next
`flows calibrate` writes it anew.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import tempfile
from pathlib import Path

from flows.errors import SpecError
from schedulers.calibration import Calibration, Hardware, calibration_key
from workers.loading.cache import cache_root

_log = logging.getLogger(__name__)

_CPU_KEYS = ("model name", "cpu family", "model")


def hardware_of(device: str) -> dict[str, str | int]:
    """What step costs depend on beside the model: device, processor or GPU, cores, threads, torch's
    version, platform.

    Args:
        device: torch's name for it, as in `ModelInfo.device`: "cpu", "cuda", "cuda:1".
    """
    import torch

    kind = device.partition(":")[0]
    name = torch.cuda.get_device_name(device) if kind == "cuda" else processor_name()
    return {
        "device": kind,
        "processor": name,
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def processor_name() -> str:
    """The processor's name, with family and model number where a virtual machine hides it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = (re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE) for key in _CPU_KEYS)
    name, family, model = (match[1].strip() if match else "" for match in found)
    if not name:
        return platform.processor() or platform.machine()
    return f"{name} (family {family}, model {model})"


def num_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def calibration_path(key: str) -> Path:
    """Where the calibration with that key is, if there is one."""
    return cache_root() / "calibrations" / f"{key}.json"


def load_calibration(
    *, hardware: Hardware, model_fingerprint: str, dtype: str
) -> Calibration | None:
    """The calibration of this hardware, model and number format; None when there is none that can
    be read (the reason is logged).
    """
    path = calibration_path(calibration_key(hardware, model_fingerprint, dtype))
    try:
        found = Calibration.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:
        _log.warning("the calibration %s is ignored: %s", path, fault)
        return None
    if found.key != path.stem:
        _log.warning("the calibration %s is ignored: it is of other hardware or model", path)
        return None
    return found


def store_calibration(calibration: Calibration) -> Path:
    """Write a calibration, whole or not at all, in place of an older one. Returns its path.

    Raises:
        SpecError: the cache cannot be written.
    """
    path = calibration_path(calibration.key)
    text = json.dumps(calibration.to_json(), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except OSError as fault:
        raise SpecError(
            f"the calibration cannot be written to {path} ({fault}); "
            "make room there, or set HEADRACE_CACHE to another folder"
        ) from fault
    return path


def _replace(path: Path, text: str) -> None:
    """Write beside the file, then rename: a reader sees the old text or the new one."""
    handle, name = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
