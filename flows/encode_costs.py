"""What encoding costs on this machine: kept from job to job, as superbatches are cut before a model
is loaded. CACHE/encode-costs/KEY.json, one for each processor, device, model and number format.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

import xxhash

from flows.calibration import num_cores, processor_name
from flows.spec_model import EngineSpec
from schedulers.encode_cost import EncodeCost, EncodeSample, fit_encode
from workers.loading.cache import cache_root

_log = logging.getLogger(__name__)


def cost_key(model_fingerprint: str, task: str, engine: EngineSpec) -> str:
    """What a cost belongs to."""
    parts = [
        processor_name(), str(num_cores()), str(engine.workers or 1), engine.device, engine.dtype,
        model_fingerprint, task,
    ]  # fmt: skip
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def load_cost(key: str) -> EncodeCost | None:
    """The cost that was measured before; None when there is none that can be read."""
    path = cache_root() / "encode-costs" / f"{key}.json"
    try:
        return EncodeCost(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as fault:
        _log.warning("the encode cost %s is ignored: %s", path, fault)
        return None


def learn_cost(key: str, samples: Sequence[EncodeSample]) -> EncodeCost | None:
    """Fit a job's calls, and keep what they tell; None when they tell too little.

    Where all calls are of a size, the fixed part stays what it was known to be.
    """
    earlier = load_cost(key)
    fit = fit_encode(samples, earlier=earlier)
    if fit is None or not (fit.is_identified or earlier is not None):
        return None
    path = cache_root() / "encode-costs" / f"{key}.json"
    draft = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(fit.cost)), encoding="utf-8")
        draft.replace(path)
    except OSError as fault:
        _log.warning("the encode cost cannot be kept in %s: %s", path, fault)
    return fit.cost
